"""The store. Knows neither gRPC nor protobuf.

`Store.open` opens a data directory and builds the parts of the store: attributes of a `Store` such as `commits`, `cuts`
or `administration`. The rest of the server is handed the part that it needs.

The rest of the server imports the names below (from here, or from the module that defines them), and from these rooms:

    values, formats, disk/layout, catalog/indexes, commit/soundness
                    the vocabulary of the engine: pure, without state
    journal, durables, loads, replicas
                    the rows and answers of these features

Everything else is the engine's own; a test holds the imports of the server against this page.
"""

from __future__ import annotations

from typing import Final

from sow_server.engine.administration.administration import Administration
from sow_server.engine.catalog.topics import KnownOrigins, Topic, Topics, check_name, check_settings, topic_deleted
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.observers import Committed, Observer
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.origins import Origins
from sow_server.engine.commit.pace import CallsUnderWay
from sow_server.engine.commit.reclaim import RECLAIM_RECORDS
from sow_server.engine.commit.requests import RequestLimits, payload_key
from sow_server.engine.disk.rocks import Damaged, Failed, RocksError, RocksOptions, Stale
from sow_server.engine.durables.commits import DurableCommits
from sow_server.engine.following import Beats, Follower, Moment, TopicImage
from sow_server.engine.opening import Instance
from sow_server.engine.reading import Counts, Cut, Cuts, CutSource, ManyCut
from sow_server.engine.store import Store, StoreOptions
from sow_server.engine.upkeep import Upkeep
from sow_server.engine.values.errors import OpenError, Reason, StoreError

__all__ = [
    "OPEN_ROOMS",
    "RECLAIM_RECORDS",
    "Administration",
    "Beats",
    "CallsUnderWay",
    "Commits",
    "Committed",
    "Counts",
    "Cut",
    "CutSource",
    "Cuts",
    "Damaged",
    "DurableCommits",
    "Failed",
    "Follower",
    "Instance",
    "KnownOrigins",
    "ManyCut",
    "Moment",
    "Observer",
    "OpenError",
    "Origins",
    "Reason",
    "RequestLimits",
    "RocksError",
    "RocksOptions",
    "Stale",
    "Store",
    "StoreError",
    "StoreOptions",
    "Topic",
    "TopicImage",
    "Topics",
    "Upkeep",
    "WriterOptions",
    "check_name",
    "check_settings",
    "payload_key",
    "topic_deleted",
]

OPEN_ROOMS: Final = (
    "values",
    "formats",
    "disk.layout",
    "catalog.indexes",
    "commit.soundness",
    "journal",
    "durables",
    "loads",
    "replicas",
)
"""Rooms and modules that the rest of the server imports from; whatever is in them."""
