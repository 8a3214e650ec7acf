"""The store. Knows neither gRPC nor protobuf; `store.Store` is its only door."""
