"""Changes of topics and policies: each is a step, or a step in rounds, for the writer.

parts           the parts of the store that such a change touches
administration  the door: queues the changes, and tells settings in force
creating        topics that come
altering        new settings of one topic, with its journal, durables, indexes and dead letters
expiration      the part of new settings that is about expiration, for one topic or many
policies        new policies, with the settings of their topics
deleting        topics that go
"""
