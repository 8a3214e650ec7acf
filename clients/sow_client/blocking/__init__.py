"""The blocking client. clients/generate_blocking.py makes the other modules of this package from `sow_client.aio`."""

from __future__ import annotations

from sow_client._arguments import refused_by_name
from sow_client.blocking._following import Following
from sow_client.blocking._inspecting import Inspecting
from sow_client.blocking._leasing import Leasing
from sow_client.blocking._loading import Loading
from sow_client.blocking._querying_sql import Sql
from sow_client.blocking._snapshots import Snapshots


@refused_by_name
class Client(Leasing, Sql, Snapshots, Following, Loading, Inspecting):
    """A connection to a sow server. It connects at the first call, and again by itself after a break.

    Many threads may use it at once; a publisher, a query result and a subscription belong to one thread. It raises
    SowError and its subclasses.
    """
