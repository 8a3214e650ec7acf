"""The contract of sow: generated gRPC stubs (`sow.v1`) and the notation of durations."""
