"""Answers queries: finds records, orders them, projects their fields. Knows neither gRPC nor protobuf."""
