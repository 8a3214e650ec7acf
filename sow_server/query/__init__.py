"""Answering queries: which records, in which order, with which of their fields. Knows neither gRPC nor protobuf."""
