"""Peers that were added by command, and pauses (rule R14): their rows, and the steps that change them.

One row in `meta` for each name, JSON:

    "link/" name      the settings of a peer or source that was added by command, if it was; whether sending is paused

    [1]  A row of settings is in force from its commit on, as an entry of the configuration is from the start on: the
         topics are shared (`sharing`), and the journal is held.
    [2]  A removed peer leaves no hold: neither on the journal nor on tombstones. So tombstones go that it has not seen,
         and it is remembered as one that has missed them (`missed`) and whose changes have to wait (`wait_for`). If it
         comes back it takes the data here first (rule R4).
    [3]  The configuration wins: a name in it has no settings here.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final, NamedTuple

from sow_peering import PeerState
from sow_server.engine.commit.draft import Draft
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import LINK_KEY, link_key, peer_key
from sow_server.engine.disk.rocks import META
from sow_server.engine.pending import Pending
from sow_server.engine.replicas.model import encode_peer
from sow_server.engine.replicas.peers import Peers
from sow_server.engine.replicas.sharing import SharedTopics
from sow_server.engine.replicas.sources import Sources
from sow_server.engine.values.errors import Reason, StoreError

COMMANDED_MAX: Final = 1000
"""Peers and sources that commands can add."""


class CommandedPeer(NamedTuple):
    """The settings of a peer or source that was added by command; texts as in `[[replication.peers]]`."""

    name: str
    address: str = ""
    """Empty: it only sends here, and is sent nothing."""
    topics: str = ".*"
    mode: str = "async"
    filter: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""
    token_file: str = ""


class _Row(NamedTuple):
    settings: CommandedPeer | None = None
    """None: the peer is in the configuration."""
    paused: bool = False


class CommandedPeers:
    """Owns the rows. They change on the writer's thread, in commits; other threads read them."""

    def __init__(self, core: Core, peers: Peers, sources: Sources, shared: SharedTopics) -> None:
        self.rocks: Final = core.rocks
        self.peers: Final = peers
        self.sources: Final = sources
        self._commits = core.commits
        self._topics = core.topics
        self._shared = shared
        self.rows: dict[str, _Row] = {}
        cursor = core.rocks.cursor(META)
        try:
            for key, row in cursor.rows(LINK_KEY, LINK_KEY + b"\xff"):
                self.rows[key[len(LINK_KEY) :].decode()] = _decoded(row)
        finally:
            cursor.close()
        for settings in self.added():
            if settings.address and peers.pattern(settings.name) is None:  # the configuration wins ([3])
                peers.declare(settings.name, settings.topics)
        sources.cover()

    def added(self) -> list[CommandedPeer]:
        """The peers and sources that were added by command, by name."""
        return [row.settings for _, row in sorted(self.rows.items()) if row.settings is not None]

    def paused(self) -> set[str]:
        """The peers that nothing is sent to at present, also those of the configuration."""
        return {name for name, row in self.rows.items() if row.paused}

    def add(self, settings: CommandedPeer) -> Pending[None]:
        """Adds a peer, or a source, or replaces its settings."""
        before = self.rows.get(settings.name, _Row())
        return self._commits.run(_Put(self, settings.name, before._replace(settings=settings)))

    def pause(self, name: str, *, paused: bool) -> Pending[None]:
        """Stores whether sending to a peer is paused."""
        before = self.rows.get(name, _Row())
        return self._commits.run(_Put(self, name, before._replace(paused=paused)))

    def remove(self, name: str) -> Pending[None]:
        """Removes a peer or source that was added by command ([2])."""
        return self._commits.run(_Remove(self, name))

    def settle(self, configured: Collection[str]) -> Pending[list[str]] | None:
        """To be called at the start, with the names in the configuration: they win ([3]). Answers the names that had
        been added by command before. None: there is nothing to do."""
        names = [
            name for name, row in self.rows.items() if (name in configured) == (row.settings is not None)
        ]  # in the configuration now, or a pause of a peer that has left it
        return self._commits.run(_Settle(self, names, configured)) if names else None

    def stage(self, draft: Draft, name: str, row: _Row) -> None:
        """Puts a row; one that says nothing goes."""
        if row == _Row():
            draft.batch.deletes[META].append(link_key(name))
        else:
            draft.batch.puts[META][link_key(name)] = _encoded(row)

    def apply(self, name: str, row: _Row) -> None:
        """The row is in force, after the commit ([1])."""
        rows = dict(self.rows)  # read on other threads
        if row == _Row():
            rows.pop(name, None)
        else:
            rows[name] = row
        self.rows = rows

    def cover(self) -> None:
        """Other topics may be shared from now on, or no longer. To be called after the commit."""
        self.sources.cover()
        for topic in self._topics.by_id.values():
            topic.replicated = self._shared.covers(topic.name)


class _Put:
    """The step that stores a peer, or a pause."""

    def __init__(self, owner: CommandedPeers, name: str, row: _Row) -> None:
        self._owner = owner
        self._name = name
        self._row = row

    def stage(self, draft: Draft) -> None:
        """Puts the row."""
        if self._name not in self._owner.rows and len(self._owner.rows) >= COMMANDED_MAX:
            raise StoreError(Reason.LIMIT_EXCEEDED, f"name: {COMMANDED_MAX} peers were added by command", field="name")
        self._owner.stage(draft, self._name, self._row)

    def committed(self) -> None:
        """The peer is in force."""
        owner, settings = self._owner, self._row.settings
        owner.apply(self._name, self._row)
        if settings is not None and settings.address:
            owner.peers.declare(settings.name, settings.topics)
        owner.cover()


class _Remove:
    """The step that removes a peer ([2])."""

    def __init__(self, owner: CommandedPeers, name: str) -> None:
        self._owner = owner
        self._name = name
        self._state = PeerState()

    def stage(self, draft: Draft) -> None:
        """Removes the row, and leaves the notes for its return."""
        owner, name = self._owner, self._name
        owner.stage(draft, name, _Row())
        before = owner.peers.peer(name)
        if before.identity is not None or before.missed:
            self._state = PeerState(before.identity, 0, missed=True)
            draft.batch.puts[META][peer_key(name)] = encode_peer(self._state)
        owner.sources.stage_removed(draft, name, before.identity, owner.peers.pattern(name))

    def committed(self) -> None:
        """Nothing is held for the peer from now on."""
        self._owner.apply(self._name, _Row())
        self._owner.peers.undeclare(self._name, self._state)
        self._owner.cover()


class _Settle:
    """The step in which the configuration wins ([3])."""

    def __init__(self, owner: CommandedPeers, names: list[str], configured: Collection[str]) -> None:
        self._owner = owner
        self._names = names
        self._configured = configured

    def _row(self, name: str) -> _Row:
        return _Row(None, self._owner.rows[name].paused) if name in self._configured else _Row()

    def stage(self, draft: Draft) -> None:
        """Puts the rows without settings."""
        for name in self._names:
            self._owner.stage(draft, name, self._row(name))

    def committed(self) -> list[str]:
        """The names that the configuration has taken over."""
        owner = self._owner
        taken = [name for name in self._names if owner.rows[name].settings is not None]
        for name in self._names:
            owner.apply(name, self._row(name))
        for name in taken:
            owner.peers.configure(name)
        owner.cover()
        return taken


def _encoded(row: _Row) -> bytes:
    settings = None if row.settings is None else row.settings._asdict()
    return json.dumps({"settings": settings, "paused": row.paused}).encode()


def _decoded(row: bytes) -> _Row:
    fields = json.loads(row)
    settings = None if fields["settings"] is None else CommandedPeer(**fields["settings"])
    return _Row(settings, fields["paused"])
