"""The `sow` command: topics, publishing, reading and deleting from a terminal or a script.

Owns the user interface: arguments, output formats, exit codes. It talks to a server through `sow_client` only.
"""
