"""The version of this distribution, also where it is used without being installed: from a checkout, or as a zip."""

__version__ = "0.1.0"
