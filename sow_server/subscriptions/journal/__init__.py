"""Changes that are read from the journal: replays, bounded ranges, and the history of a key."""
