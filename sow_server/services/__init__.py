"""gRPC adapters: validate, call, translate. Protobuf goes no further in than this."""
