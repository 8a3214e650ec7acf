"""Deletes topics that nobody uses."""
