"""Shared by several tests: builders, fakes and a server in a subprocess. Nothing here is installed."""
