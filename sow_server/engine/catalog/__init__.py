"""Topics and indexes as they are at the moment."""
