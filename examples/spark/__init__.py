"""Pipelines between Spark and a server: a bulk load, a snapshot, a history, an enrichment. Each is one file."""
