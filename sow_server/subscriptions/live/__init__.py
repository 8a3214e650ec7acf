"""Changes as they are committed: which subscribers get each, and as which message."""
