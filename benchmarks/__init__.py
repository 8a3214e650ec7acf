"""Benchmarks against peers and against the limits of the parts: `python -m benchmarks [NAME…] [--quick]`."""
