"""The contract of sow: generated gRPC stubs (`sow.v1`) and the notations of durations and sizes."""
