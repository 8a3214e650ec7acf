"""Durable subscriptions: their consumers, what these hold back, and their replication."""
