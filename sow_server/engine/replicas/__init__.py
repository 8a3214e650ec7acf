"""Other instances: what was shipped to them, and what they send."""
