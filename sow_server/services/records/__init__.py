"""Reading and writing records for the services: without an RPC of its own."""
