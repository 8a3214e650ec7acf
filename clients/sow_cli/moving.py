"""Moves topics with their data from one cell to another (rules C15 to C18).

[1]  It is only the coordinator. The servers decide when a cell takes a topic, and finish a switch that has begun
     without it. It may be ended at any point: run again, it goes on from the state of the servers, and keeps none.
[2]  A copy is deleted only once the other cell serves the topic, and has acknowledged all of the copy over a link.
[3]  A link is the move's own if it was added by command and its pattern is that of the move. No other is removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Final, NamedTuple, cast

from sow_cli.exits import Refused
from sow_cli.placement_text import addresses_of, cell_in, escaped, matches, moved_text
from sow_cli.session import Session
from sow_client import (
    Client,
    OutgoingLink,
    Placement,
    ReplicationStatus,
    SowError,
    Topic,
    TopicSettingsArguments,
    Unavailable,
)
from sow_client._cells import is_address

ASK_SECONDS: Final = 0.05
ASK_SOON_SECONDS: Final = 0.005
"""The pause between two questions while no cell takes the topics."""
PREPARE_SECONDS: Final = 1.0
"""The longest pause between two attempts to prepare: each is audited, and a large topic takes long."""
TELL_SECONDS: Final = 10.0
"""A step that takes longer tells again what it waits for."""
LAG_SECONDS: Final = 0.2
"""The switch begins once a change takes no longer than this to the other cell."""
BACK_SECONDS_MAX: Final = 3.0
"""The wait for the old cell to hear how far the new one is. Servers tell that every second where nothing is sent."""


class LinkFiles(NamedTuple):
    """Credentials of the links, as files on the machines of the servers."""

    ca: str = ""
    certificate: str = ""
    key: str = ""
    token_file: str = ""


_LOADING: Final = ("staging", "applying", "deleting")
NO_FILES: Final = LinkFiles()


class Moved(NamedTuple):
    """The outcome."""

    topics: tuple[str, ...]
    left: str
    """The cell that they have left; empty: they have left it before."""
    cell: str
    version: int
    pause_seconds: float | None
    """The time in which no cell took the topics; None: the switch was before."""
    kept: tuple[str, ...]
    """Copies that are still there, each as `TOPIC at ADDRESS`."""


@dataclass(slots=True)
class _Instance:
    """One server of a cell."""

    cell: str
    address: str
    client: Client
    name: str
    cluster: str
    placed: Placement

    def look(self) -> Placement:
        self.placed = self.client.placement()
        return self.placed

    @property
    def shown(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(slots=True)
class Mover:
    """Owns a client to each server. To be used in a `with` block."""

    session: Session
    topics: tuple[str, ...]
    cell: str
    tell: Callable[[str], None]
    """Gets a line for each step."""
    files: LinkFiles = NO_FILES
    keep: bool = False
    links_before: float = 0.0
    """Seconds from the moment when everything was sent for the first time to the switch: a bookmark of this time is one
    of the other cell, too (rule F6)."""
    links_for: float = 0.0
    """Seconds for which the links stay after the switch."""
    back_files: LinkFiles | None = None
    """Those of the links from the new cell; None: `files`, too."""
    _open: ExitStack = field(default_factory=ExitStack)
    _instances: list[_Instance] = field(default_factory=list)
    _unreachable: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    # ---- the whole ----

    def move(self) -> Moved:
        """Moves the topics. Raises Refused, SowError."""
        self._connect()
        newest = max(self._instances, key=lambda one: one.placed.version).placed
        text, version = newest.text, newest.version
        cells = {topic: cell_in(text, topic) for topic in self.topics}
        left = {cell for cell in cells.values() if cell != self.cell}
        if len(left) > 1:
            raise Refused(
                f"the topics live in the cells {', '.join(sorted(left))}: move those of each cell by themselves"
            )
        targets = self._of(self.cell)
        pause = None
        if left:
            if set(cells.values()) != left:
                there = ", ".join(topic for topic, cell in cells.items() if cell == self.cell)
                raise Refused(f"{there}: lives in the cell {self.cell} already; leave it out")
            (from_cell,) = left
            sources = self._of(from_cell)
            _check_clusters(sources, targets)
            self._check_sources(sources)
            self._replicate(sources, targets)
            text, version = moved_text(text, self.topics, self.cell), version + 1
        else:
            found = self._left(targets)
            from_cell = found.pop() if len(found) == 1 else ""
            sources = self._of(from_cell) if from_cell else [one for one in self._instances if one.cell != self.cell]
            if from_cell:  # somebody may have removed the links, or what was prepared
                self._check_copies(sources, targets)
                self._link_all(sources, targets)
        if from_cell or any(one.placed.version < version or self._waits(one) for one in self._instances):
            pause = self._switch(text, version, sources, targets, is_new=bool(left))
        else:
            self.tell(f"the cell {self.cell} has {_named(self.topics)} already: nothing is to be switched")
        kept = self._clean(sources, targets)
        return Moved(self.topics, from_cell, self.cell, version, pause, tuple(kept))

    def abort(self, *, accept_loss: bool) -> Moved:
        """Undoes a move that has not switched: the topics stay where they are. Raises Refused, SowError."""
        self._connect()
        targets = self._of(self.cell)
        waiting = [one for one in self._instances if self._waits(one)]
        if why := self._too_late(targets):
            if not accept_loss:
                raise Refused(
                    f"{why}. Run the move again to end it. If the cell that the topics leave is lost for good, "
                    "--accept-loss lets the other one go on with what it has"
                )
            return self._go_on_with_loss(targets, waiting)
        for one in waiting:
            one.client.drop_placement()
            self.tell(f"{one.shown} has forgotten the placement that it had prepared")
        for one in self._instances:
            one.look()
        if why := self._too_late(targets):  # another run has switched meanwhile
            raise Refused(f"{why}. Run the move again to end it")
        kept = []
        for target in targets:
            own = self._own_links(target)
            self._remove(target, own)
            for topic in self.topics:
                if target.client.placement(topic).copy is None:
                    continue
                if own or target in waiting:
                    target.client.delete_topic(topic, here=True, force=True)
                    self.tell(f"{target.shown} has deleted its copy of {topic}")
                else:
                    kept.append(f"{topic} at {target.address}")
        for one in self._instances:
            self._remove(one, self._own_links(one))
        return Moved(self.topics, "", self.cell, targets[0].placed.version, None, tuple(kept))

    def _waits(self, one: _Instance) -> bool:
        """True if a placement waits there for these topics. Raises Refused if it also waits for others."""
        prepared = one.placed.prepared
        if prepared is None or not set(prepared.topics) & set(self.topics):
            return False
        if more := set(prepared.topics) - set(self.topics):
            raise Refused(f"these topics move together with others. Also name: {' '.join(sorted(more))}")
        return True

    def _too_late(self, targets: Sequence[_Instance]) -> str:
        """The reason why a cell may have given the topics away already: then the copies may be the only ones ([2])."""
        for cell in sorted(self._left(targets) & self._unreachable.keys()):
            return f"the switch may have begun: the cell {cell} does not answer at {self._unreachable[cell]}"
        for one in self._instances:
            for topic in self.topics:
                if cell_in(one.placed.text, topic) == self.cell:
                    return f"the switch has begun: {one.shown} has {topic} in the cell {self.cell}"
        return ""

    def _left(self, targets: Sequence[_Instance]) -> set[str]:
        """The cells in which some of the topics live as the targets see it: none, once they serve all of them."""
        return {target.client.placement(topic).topic_cell for target in targets for topic in self.topics} - {self.cell}

    def _go_on_with_loss(self, targets: Sequence[_Instance], waiting: Sequence[_Instance]) -> Moved:
        """Lets the targets take the topics with what they have. Copies and links stay, for the case that servers of the
        other cell come back."""
        newest = max(self._instances, key=lambda one: one.placed.version).placed
        text, version = newest.text, newest.version
        if any(cell_in(text, topic) != self.cell for topic in self.topics):
            text, version = moved_text(text, self.topics, self.cell), version + 1
        others = [one for one in self._instances if one not in targets]
        for one in others:  # first: what is left of the other cell must not take the topics any more
            self._bring(one, text, version)
        for one in others:
            if self._links(one, targets):
                self._has_given(one, targets)  # as much as comes within some seconds
        for one in targets:
            self._bring(one, text, version)
            if one in waiting:
                one.client.drop_placement()
                self.tell(f"{one.shown} waits no more, and takes {_named(self.topics)}")
        return Moved(self.topics, "", self.cell, version, None, ())

    def _bring(self, one: _Instance, text: str, version: int) -> None:
        """Takes a placement into use at a server, unless it has it."""
        if one.look().version < version:
            one.client.reload_placement(text)
            self.tell(f"{one.shown} has version {version} of the placement")

    # ---- the servers ----

    def _connect(self) -> None:
        with self.session.client() as client:
            found = client.placement()
        if not found.cell:
            raise Refused("this server has no placement: all topics live here, and there is no other cell")
        if not found.text:
            raise Refused("a move needs the permission operator in all cells, and servers that know it")
        if self.cell not in found.cells:
            raise Refused(f"there is no cell {self.cell}; the cells are {', '.join(found.cells)}")
        for cell, servers in found.cells.items():
            names: set[str] = set()
            for address in servers:
                if not is_address(address):
                    raise Refused(f"{address!r}, of the cell {cell}, is not HOST:PORT")
                # It stays in its cell: only the word of the server that the user has named counts (rule C11).
                client = self._open.enter_context(replace(self.session, server=address).client()).here
                try:
                    told = client.describe_instance()
                    if told.name not in names:  # an instance may have several addresses
                        one = _Instance(cell, address, client, told.name, told.cluster, client.placement())
                        self._instances.append(one)
                        names.add(told.name)
                except SowError as error:
                    if not isinstance(error, Unavailable):
                        raise
                    self._unreachable[cell] = f"{address}: {error.message}"
        for one in self._instances:
            if one.placed.text and addresses_of(one.placed.text) != addresses_of(found.text):
                raise Refused(
                    f"{one.shown} has other addresses of cells than {self.session.server}: load the newer placement "
                    "everywhere first, see sow cells reload --all"
                )

    def _of(self, cell: str) -> list[_Instance]:
        """The instances of a cell, all of which answer. Raises Refused."""
        if cell in self._unreachable:
            raise Refused(f"all servers of the cell {cell} have to answer: {self._unreachable[cell]}")
        return [one for one in self._instances if one.cell == cell]

    # ---- what moves ----

    def _check_sources(self, sources: Sequence[_Instance]) -> None:
        """Raises Refused where something would be lost, or parted."""
        for source, topic in product(sources, self.topics):
            client, found = source.client, source.client.describe_topic(topic)
            if not found.is_view and not found.settings.journal:
                raise Refused(f"{topic} has no journal, so it cannot be replicated: publish it anew in the other cell")
            left = [one.name for one in client.durables(topic) if not one.replicated and not one.pin]
            if left:
                raise Refused(
                    f"the durables {', '.join(left)} of {topic} are not replicated, and would begin anew: sow topic "
                    f"alter {topic} --replicate-durables"
                )
            if any(load.phase in _LOADING for load in client.loads(topic)):
                raise Refused(f"a load of {topic} is under way: wait for its end")
        missing = _together(sources[0].client.topics(), self.topics)
        if missing:
            raise Refused(
                f"views and their source live in one cell, and so do a topic and its dead letters. Also name: "
                f"{' '.join(sorted(missing))}"
            )

    @property
    def pattern(self) -> str:
        """The topics of the links."""
        return "|".join(escaped(topic) for topic in sorted(self.topics))

    def _replicate(self, sources: Sequence[_Instance], targets: Sequence[_Instance]) -> None:
        """Creates the copies, and links both cells."""
        described = [sources[0].client.describe_topic(topic) for topic in self.topics]
        for target in targets:
            linked = bool(self._links(target, sources))
            for topic in sorted(described, key=lambda one: one.is_view):  # sources before their views
                copy = target.client.placement(topic.name).copy
                if copy is None:
                    _create(target.client, topic)
                    self.tell(f"{target.shown} has created {topic.name}")
                elif copy.records and not linked:
                    raise Refused(
                        f"{target.shown} has a copy of {topic.name} with {copy.records} records, of no link. `sow "
                        "doctor` says which copy is newer. To delete this one: "
                        f"sow topic delete {topic.name} --here --server {target.address}"
                    )
        self._link_all(sources, targets)

    def _check_copies(self, sources: Sequence[_Instance], targets: Sequence[_Instance]) -> None:
        """Raises Refused where a topic has been given away, and does not come here by a move."""
        for target, topic in product(targets, self.topics):
            placed = target.client.placement(topic)
            if placed.topic_cell == self.cell:
                continue
            if placed.copy is None or not (self._waits(target) or self._links(target, sources)):
                raise Refused(
                    f"{placed.topic_cell} has given {topic} away, and {target.shown} has no copy of this move: place "
                    f"it in {placed.topic_cell} again, with a higher version of the placement, and then move it"
                )

    def _link_all(self, sources: Sequence[_Instance], targets: Sequence[_Instance]) -> None:
        for source in sources:
            for target in targets:
                self._link(target, source)  # the source is accepted first
                self._link(source, target)

    def _links(self, one: _Instance, others: Sequence[_Instance]) -> list[OutgoingLink]:
        """The links on which an instance sends all of the topics to some others."""
        names = {other.name for other in others}
        return [
            link
            for link in one.client.replication_status().outgoing
            if link.peer in names and all(matches(link.topics_pattern, topic) for topic in self.topics)
        ]

    def _own_links(self, one: _Instance) -> list[str]:
        """The peers to which an instance sends for this move ([3])."""
        status = one.client.replication_status()
        return [
            link.peer for link in status.outgoing if link.origin == "command" and link.topics_pattern == self.pattern
        ]

    def _link(self, sender: _Instance, receiver: _Instance) -> None:
        if self._links(sender, [receiver]):
            return
        present = {link.peer: link for link in sender.client.replication_status().outgoing}
        if (link := present.get(receiver.name)) is not None:
            raise Refused(
                f"{sender.shown} sends other topics to {receiver.name}: {link.topics_pattern}. Add {self.pattern} to "
                "them (in the file, or with sow replication add-peer --replace), or end that link first"
            )
        files = (sender.cell == self.cell and self.back_files) or self.files
        sender.client.add_peer(receiver.name, receiver.address, topics_pattern=self.pattern, **files._asdict())
        self.tell(f"{sender.shown} sends to {receiver.name}")

    # ---- the switch ----

    def _switch(
        self,
        text: str,
        version: int,
        sources: Sequence[_Instance],
        targets: Sequence[_Instance],
        *,
        is_new: bool,
    ) -> float | None:
        """Prepares the placement, and switches. Returns the seconds in which no cell took the topics."""
        names = [one.name for one in sources]
        if is_new:
            for target in targets:
                self._prepare(target, text, names, sources)
            for one in self._instances:
                if one not in sources and one not in targets:
                    one.client.prepare_placement(text, self.topics, names)
            heads = {target.name: target.client.replication_status().last_sequence for target in targets}
            time.sleep(self.links_before)
            if self.links_before:
                self._await_back(sources, targets, heads)
            self._await_even(sources, targets)
        began = time.monotonic()
        for source in sources:
            self._bring(source, text, version)
        for target in targets:  # it waits, unless somebody has made it forget
            if target.look().version < version and target.placed.prepared is None:
                self._prepare(target, text, names, sources)
        self._await([partial(self._not_arrived, one, version) for one in targets])
        paused = time.monotonic() - began
        for one in self._instances:
            self._bring(one, text, version)
        for cell, why in self._unreachable.items():
            self.tell(f"the cell {cell} still has an older placement, as it does not answer ({why})")
        return paused if is_new else None

    def _prepare(self, target: _Instance, text: str, names: Sequence[str], sources: Sequence[_Instance]) -> None:
        """Prepares the placement once everything was sent for the first time."""

        def lacks() -> str:
            try:
                target.client.prepare_placement(text, self.topics, names)
            except SowError as error:
                if error.reason != "BEHIND":
                    raise
                return "; ".join([error.message.removeprefix("prepare.sources: "), *self._faults(sources, target)])
            return ""

        self._await([lacks], longest=PREPARE_SECONDS)
        self.tell(f"{target.shown} is ready to take {_named(self.topics)}")

    def _faults(self, sources: Sequence[_Instance], target: _Instance) -> list[str]:
        """The reasons why links are down that only their senders know, such as a wrong token. Raises Refused if a topic
        can never arrive."""
        faults = []
        for source in sources:
            for link in self._links(source, [target]):
                faults += [f"{source.shown} says: {link.last_error}"] if link.last_error else []
                for topic in link.topics:
                    if topic.state == "refused" and topic.topic in self.topics:
                        raise Refused(f"{target.shown} refuses {topic.topic} from {source.shown}: {topic.message}")
        return faults

    def _await_even(self, sources: Sequence[_Instance], targets: Sequence[_Instance]) -> None:
        """Returns once a change takes a moment only: what is under way at the switch prolongs the pause."""
        for source in sources:
            for target in targets:

                def lags(source: _Instance = source, target: _Instance = target) -> str:
                    began = time.monotonic()
                    head = source.client.replication_status().last_sequence
                    while time.monotonic() - began < LAG_SECONDS:
                        if _acknowledged(source.client.replication_status(), target.name) >= head:
                            return ""
                        time.sleep(ASK_SOON_SECONDS)
                    return f"{target.name} is behind {source.name}"

                self._await([lags])

    def _await_back(self, sources: Sequence[_Instance], targets: Sequence[_Instance], heads: Mapping[str, int]) -> None:
        """Returns once the old cell has everything of the new one up to there. From then on its bookmarks lead to
        positions after the creation of the copy. Only readers need that, so it does not wait for long."""
        give_up = time.monotonic() + BACK_SECONDS_MAX
        for target in targets:
            for source in sources:
                while time.monotonic() < give_up:
                    if _acknowledged(target.client.replication_status(), source.name) >= heads[target.name]:
                        break
                    time.sleep(ASK_SECONDS)

    def _not_arrived(self, one: _Instance, version: int) -> str:
        placed = one.look()
        if placed.prepared is not None:
            return f"{one.shown} waits: {placed.prepared.message}"
        return "" if placed.version >= version else f"{one.shown} has version {placed.version} of the placement"

    def _await(self, conditions: Sequence[Callable[[], str]], *, longest: float = ASK_SOON_SECONDS) -> None:
        """Returns once none of the conditions has a reason to wait any more. `longest`: the pauses double up to it."""
        for condition in conditions:
            told_at, pause = time.monotonic(), ASK_SOON_SECONDS
            while reason := condition():
                if time.monotonic() - told_at > TELL_SECONDS:
                    self.tell(reason)
                    told_at = time.monotonic()
                time.sleep(pause)
                pause = min(2 * pause, longest)

    # ---- the end ----

    def _clean(self, sources: Sequence[_Instance], targets: Sequence[_Instance]) -> list[str]:
        """Deletes the copies that are left, and removes the links of the move. Returns the copies that stay ([2])."""
        if self.links_for and any(self._own_links(one) for one in sources):
            self.tell(f"the links stay for {self.links_for:g} s, for readers that come from the other cell")
            time.sleep(self.links_for)
        kept = []
        for source in sources:
            copies = [topic for topic in self.topics if source.client.placement(topic).copy is not None]
            is_safe = bool(copies) and not self.keep and self._has_given(source, targets)
            for topic in reversed(copies) if is_safe else copies:
                if is_safe:
                    source.client.delete_topic(topic, here=True, force=True)
                    self.tell(f"{source.shown} has deleted its copy of {topic}")
                else:
                    kept.append(f"{topic} at {source.address}")
        for one in (*sources, *targets):
            self._remove(one, self._own_links(one))
        return kept

    def _has_given(self, source: _Instance, targets: Sequence[_Instance]) -> bool:
        """True if all of the targets have acknowledged everything of the source over links ([2])."""
        head = source.client.replication_status().last_sequence
        give_up = time.monotonic() + TELL_SECONDS
        while True:
            status = source.client.replication_status()
            links = self._links(source, targets)
            if len(links) < len(targets) or any(link.topics for link in links):
                return False
            if all(_acknowledged(status, target.name) >= head for target in targets):
                return True
            if time.monotonic() > give_up:
                return False
            time.sleep(ASK_SECONDS)

    def _remove(self, one: _Instance, peers: Sequence[str]) -> None:
        for peer in peers:
            one.client.remove_peer(peer)
            self.tell(f"{one.shown} sends to {peer} no more")


def _check_clusters(sources: Sequence[_Instance], targets: Sequence[_Instance]) -> None:
    """Raises Refused where two servers would refuse each other's links (rule R11)."""
    for source, target in product(sources, targets):
        if source.cluster and target.cluster and source.cluster != target.cluster:
            raise Refused(
                f"{source.shown} is of the cluster {source.cluster}, {target.shown} of the cluster {target.cluster}: "
                "they refuse each other's links. Take cluster out of [server] at all servers of one of the cells, and "
                "restart these servers, one after the other. Then move, and put it back"
            )


def _acknowledged(status: ReplicationStatus, peer: str) -> int:
    return next((link.acknowledged_sequence for link in status.outgoing if link.peer == peer), 0)


def _named(topics: Sequence[str]) -> str:
    return topics[0] if len(topics) == 1 else f"{len(topics)} topics"


def _create(client: Client, topic: Topic) -> None:
    """Creates a copy of a topic with the settings that are declared for it. Others follow from the policies there."""
    declared = {one.name for one in topic.effective if one.origin in ("topic", "config")}
    settings = {name: getattr(topic.settings, name) for name in declared if hasattr(topic.settings, name)}
    named = cast(TopicSettingsArguments, settings)
    if topic.view is None:
        client.create_topic(topic.name, here=True, **named)
        return
    view = topic.view
    client.create_view(
        topic.name,
        source=view.source,
        where=view.where or None,
        group_by=list(view.group_by) or None,
        select=list(view.select) or None,
        here=True,
        **named,
    )


def _together(present: Sequence[Topic], topics: Sequence[str]) -> set[str]:
    """Topics that belong to others of these (rule C6), and are not among them."""
    moved, found = set(topics), set(topics)
    pairs = [(one.name, one.view.source) for one in present if one.view is not None]
    pairs += [(one.name, one.settings.dead_letter) for one in present if one.settings.dead_letter]
    while True:
        more = {name for pair in pairs if found & set(pair) for name in pair if name} - found
        if not more:
            return found - moved
        found |= more
