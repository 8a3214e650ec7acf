"""The blocking client. clients/generate_blocking.py makes the other modules of this package from `sow_client.aio`."""

from __future__ import annotations

from sow_client.blocking._administration import Administration
from sow_client.blocking._following import Following
from sow_client.blocking._loading import Loading
from sow_client.blocking._publishing import Publishing
from sow_client.blocking._reading import Reading
from sow_client.blocking._snapshots import Snapshots


class Client(Publishing, Reading, Snapshots, Following, Administration, Loading):
    """A connection to a sow server. It connects at the first call, and again by itself after a break.

    Many threads may use it at once; a publisher, a query result and a subscription belong to one thread.

        [1]  Every error is a SowError, with gRPC's error as its cause, or a mistake of the calling program.
        [2]  A publish that is repeated, by gRPC or by a publisher, is applied once (rule P6).
    """
