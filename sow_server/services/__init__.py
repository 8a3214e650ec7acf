"""gRPC adapters: validate, call, translate. Protobuf stays in this package."""
