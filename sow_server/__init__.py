"""The server of sow: a durable state-of-the-world store behind gRPC."""

from sow.version import __version__

__all__ = ["__version__"]
