"""Benchmarks against peers and against what the parts allow: `python -m benchmarks [NAME…] [--quick]`."""
