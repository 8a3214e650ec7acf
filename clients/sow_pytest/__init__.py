"""Fixtures for the tests of programs that use sow: a real server, and its time (docs/howto/testing.md).

pytest finds `plugin` by the entry point `sow`. `process` owns the server's process, and `child` is what runs in it.
This package alone imports both the client and the server.
"""
