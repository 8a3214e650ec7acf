"""Stand-ins for one side of a conversation."""
