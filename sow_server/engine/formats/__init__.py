"""Message types: the keys, fields, deltas and sizes of payloads. Pure."""
