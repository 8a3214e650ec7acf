"""Durable subscriptions: positions and floors."""
