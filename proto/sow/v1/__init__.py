"""Generated from the `.proto` files beside this one by `proto/generate.py`; do not edit the `*_pb2*` files."""
