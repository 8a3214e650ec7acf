"""Message types: keys, fields, projections and deltas of payloads. Pure.

`payloads` has the interface of a message type, and there is one `…_format` for each. `topic_formats` finds the one of a
topic.
"""
