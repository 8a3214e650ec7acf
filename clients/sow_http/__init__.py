"""Records over HTTP: `sow http` starts this process, which is only a client of the servers that it was given.

It has no right of its own. Each request shows its token to the server, or none. `problems` tells errors, `callers`
keeps the clients, `arguments` reads what a request asks for, `records` and `loads` answer, `events` follows topics for
many listeners at once, and `app` has the one table of routes, from which the description in OpenAPI is made.
"""
