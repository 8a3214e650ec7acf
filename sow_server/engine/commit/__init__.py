"""The writer, and everything that one commit consists of."""
