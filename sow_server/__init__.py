"""The server of sow: a durable state-of-the-world store behind gRPC."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sow")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"
