"""Topics: their settings, the objects compiled from these, and their figures.

The registry is changed by the writer thread alone, after the commit that stored the change. Other threads read it:
`by_name` is replaced, never changed, so a reader sees the topics before or after a change, not between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeAlias

from sow_server.engine.catalog.indexes import INDEXES_MAX, NO_INDEXES, Indexes
from sow_server.engine.formats.payloads import Decode, DeriveKeys, Format
from sow_server.engine.formats.topic_formats import format_of, index_paths, key_paths
from sow_server.engine.stored import StoredStatistics, u32
from sow_server.engine.values.errors import Reason, StoreError, no_topic
from sow_server.engine.values.keys import TOPIC_NAME
from sow_server.engine.values.model import MessageType, TopicSettings
from sow_server.engine.values.policies import (
    BUILT_IN,
    NOTHING,
    UNUSED_DELETES,
    Declared,
    check_limits_and_values,
    refusal,
    show,
)
from sow_server.engine.values.views import ViewDefinition, ViewStatus

ONLY_WHILE_EMPTY: Final = ("key", "message_type", "separator")
UNDELIVERED: Final = "_undelivered"
"""The store's own topic of dead letters whose target is missing (rule T3). Clients read it, and delete from it."""
UNDELIVERED_ID: Final = 0
"""Ids of other topics begin at 1."""


Takers: TypeAlias = Callable[[bytes, bytes, float], int]
"""Counts the attached subscribers that a record, given by its key and stored value, matches. Called from the writer's
thread; it may search until the given time of `perf_counter`."""


class OriginNames(Protocol):
    """The names of the instances that have written records, by their numbers."""

    @property
    def names(self) -> Sequence[str]:
        """Never changed, perhaps replaced by a longer one."""


class KnownOrigins(NamedTuple):
    """Names that are known once and for all."""

    names: Sequence[str]


class Declaration(NamedTuple):
    """The declaration of a topic, from which its settings in force are resolved (rule T2)."""

    settings: Declared = NOTHING
    """The settings that were set on the topic itself."""
    in_config: bool = False
    """True if the configuration file declares the topic."""
    expiring: bool = False
    """True if expiration is enabled unless it is declared otherwise (rule L1)."""
    view: ViewDefinition | None = None
    """The definition of a view (rule V1); None: it is no view."""


UNDECLARED: Final = Declaration()


class Topic:
    """One topic. The writer thread replaces its changing parts after a commit. `settings` are in force."""

    __slots__ = (
        "_loads",
        "_replicated",
        "acts",
        "caps",
        "complete",
        "create_time_micros",
        "declaration",
        "decode_indexed",
        "derive_keys",
        "followers",
        "format",
        "full_refusals",
        "hears_removals",
        "id",
        "indexes",
        "key_paths",
        "last_use_micros",
        "name",
        "origins",
        "prefix",
        "previous_wanted",
        "records_read",
        "settings",
        "statistics",
        "stop",
        "takers",
        "ungrouped",
        "view",
        "views",
        "was_followed",
    )

    def __init__(
        self,
        topic_id: int,
        name: str,
        settings: TopicSettings,
        *,
        create_time_micros: int,
        statistics: StoredStatistics,
        indexes: Indexes = NO_INDEXES,
        declaration: Declaration = UNDECLARED,
    ) -> None:
        self.id: Final = topic_id
        self.name: Final = name
        self.prefix: Final = u32(topic_id)
        self.stop: Final = u32(topic_id + 1)
        self.declaration = declaration
        self.view: Final = declaration.view
        """Its definition, if it is a view (rule V1)."""
        self.create_time_micros: Final = create_time_micros
        self.statistics = statistics
        self.followers = 0
        """The number of followers of the topic's changes; changed under the writer's cut lock."""
        self.previous_wanted = 0
        """The number of them that need the replaced records, too; likewise."""
        self.origins: OriginNames = KnownOrigins(())
        """For the numbers in its records. Set when the topic is added to the others, or before its records are read."""
        self.takers: Takers | None = None
        """Counts the attached subscribers to which a record that is due at once is delivered (rule L7); None: nobody
        follows the topic."""
        self._replicated = False
        self._loads: tuple[tuple[int, int], ...] = ()
        self.hears_removals = False
        """True if a feature adds to the commits that remove records: a topic without one pays nothing for it."""
        self.last_use_micros = create_time_micros
        """When the topic was last used, as far as the store remembers: since its start (rule T1). Set on any thread."""
        self.full_refusals = 0
        """Records that were refused because the topic was full, since the start (rule T6)."""
        self.was_followed = False
        """True if anybody has followed it; likewise."""
        self.views: tuple[Topic, ...] = ()
        """The views of which it is the source (rule V1); replaced under the writer's cut lock."""
        self.complete = True
        """False for a view that is being built (rule V6); likewise, as the next two."""
        self.records_read = 0
        self.ungrouped = 0
        self.apply(settings, indexes)

    @property
    def in_config(self) -> bool:
        """True if the configuration file declares it."""
        return self.declaration.in_config

    @property
    def view_status(self) -> ViewStatus:
        """How far it is, if it is a view."""
        return ViewStatus(self.complete, self.records_read, self.statistics.records, self.ungrouped)

    @property
    def reserved(self) -> bool:
        """True if it is the store's own topic: clients cannot create, alter or delete it, nor publish to it (rule
        K1)."""
        return self.id == UNDELIVERED_ID

    @property
    def filled(self) -> float:
        """The stored records by their cap, or their bytes by theirs, the greater one; 0 without a cap (rule T7)."""
        if (caps := self.caps) is None:
            return 0.0
        return max(self.statistics.records / caps.records, self.statistics.record_bytes / caps.size)

    @property
    def above_caps(self) -> list[str]:
        """Warnings about the caps that it exceeds, for those who may see its figures (rule T7)."""
        found = (
            ("max_records", self.settings.max_records, self.statistics.records),
            ("max_stored_bytes", self.settings.max_stored_bytes, self.statistics.record_bytes),
        )
        return [
            f"{name}: is {show(name, cap)}, and topic {self.name} has {show(name, stored)} now; "
            "publishes that add to it are refused until there is less"
            for name, cap, stored in found
            if cap is not None and stored > cap
        ]

    @property
    def wants_previous(self) -> bool:
        """True if a change needs the record that it replaces: for the entries of indexes, or for followers."""
        return bool(self.indexes.all) or self.previous_wanted > 0

    @property
    def replicated(self) -> bool:
        """True if peers send or receive it, so that removed records leave tombstones (rule R4). Set as `followers`."""
        return self._replicated

    @replicated.setter
    def replicated(self, wanted: bool) -> None:
        self._replicated = wanted
        self._settle_hooks()

    @property
    def loads(self) -> tuple[tuple[int, int], ...]:
        """Loads with rows that are not applied yet: their numbers, and the sequence at which they were opened. Removals
        by others are marked for them meanwhile. Set by the writer thread, after a commit."""
        return self._loads

    @loads.setter
    def loads(self, loads: tuple[tuple[int, int], ...]) -> None:
        self._loads = loads
        self._settle_hooks()

    def _settle_hooks(self) -> None:
        self.hears_removals = self._replicated or bool(self._loads) or bool(self.settings.dead_letter)

    def apply(self, settings: TopicSettings, indexes: Indexes) -> None:
        """Puts new settings into force, with their indexes."""
        self.settings = settings
        self.indexes = indexes
        """Replaced by the writer thread under its cut lock, so a cut sees exactly the indexes that are complete in
        it."""
        self.acts = settings.acts_on_expiration
        self.caps = settings.caps
        self._settle_hooks()
        self.format: Format = format_of(settings)
        paths = key_paths(settings)
        self.key_paths: tuple[tuple[str, ...], ...] = tuple(paths)
        self.derive_keys: DeriveKeys | None = self.format.derive_keys(paths) if paths else None
        names = dict.fromkeys([str(index.steps[0]) for index in indexes.all])
        self.decode_indexed: Decode = self.format.decoder(list(names)) if names else self.format.decode
        """A document with at least the fields that the indexes look at."""


def undelivered_topic(create_time_micros: int, created_sequence: int) -> Topic:
    """The store's own topic of dead letters whose target is missing: any payload, under keys that name its topic."""
    return Topic(
        UNDELIVERED_ID,
        UNDELIVERED,
        TopicSettings(message_type=MessageType.BINARY),
        create_time_micros=create_time_micros,
        statistics=StoredStatistics(created_sequence=created_sequence),
        declaration=Declaration({"message_type": MessageType.BINARY}),
    )


Hear = Callable[[Topic, bool], None]
"""Called with a topic whose deadlines may have changed, and whether its settings have changed."""


class Topics:
    """All topics, by name and by id."""

    def __init__(self) -> None:
        self.by_name: MappingProxyType[str, Topic] = MappingProxyType({})
        self.by_id: MappingProxyType[int, Topic] = MappingProxyType({})
        self.origins: OriginNames = KnownOrigins(())
        """Set by the store, for every topic."""
        self.version = 0
        """Rises when a topic is added or removed, and with every change of settings."""
        self.created: Callable[[Topic], None] = lambda topic: None
        """Called with a new topic before anybody can publish to it: on the writer's thread, under the cut lock."""
        self._hear: tuple[Hear, ...] = ()

    def watch(self, hear: Hear) -> None:
        """From now on `hear` is called with each topic whose deadlines may have changed: in the order of the calls of
        `watch`, on any thread, perhaps under the cut lock. So it may do no more than take a note."""
        self._hear = (*self._hear, hear)

    def settled(self, topic: Topic) -> None:
        """The settings in force on a topic, or on its durables, have changed."""
        for hear in self._hear:
            hear(topic, True)

    def lost(self, topic: Topic) -> None:
        """A topic has lost its last follower, a durable, a load or its last record, any of which may have kept it (rule
        T1); or it was removed."""
        for hear in self._hear:
            hear(topic, False)

    def find(self, name: str) -> Topic:
        """The topic called `name`. Raises StoreError TOPIC_NOT_FOUND."""
        topic = self.by_name.get(name)
        if topic is None:
            check_name(name)
            raise no_topic(name)
        return topic

    def add(self, topic: Topic) -> None:
        """Adds a topic."""
        topic.origins = self.origins
        self._replace({**self.by_name, topic.name: topic})
        self.settled(topic)

    def completed(self) -> None:
        """A view is complete: whoever follows topics by a pattern takes it in (rule V6)."""
        self._replace(dict(self.by_name))

    def remove(self, topic: Topic) -> None:
        """Removes a topic."""
        self._replace({name: other for name, other in self.by_name.items() if other is not topic})
        self.lost(topic)

    def _replace(self, topics: dict[str, Topic]) -> None:
        self.by_name = MappingProxyType(topics)
        self.by_id = MappingProxyType({topic.id: topic for topic in topics.values()})
        self.version += 1


def topic_deleted(topic: Topic) -> StoreError:
    """The error for a caller that has held on to a topic that was removed."""
    return StoreError(Reason.TOPIC_DELETED, f"topic: {topic.name} has been deleted", field="topic")


def check_name(name: str) -> None:
    """Raises StoreError TOPIC_NAME_INVALID for a name that breaks rule K1."""
    if not TOPIC_NAME.match(name) or name.startswith("_"):
        what = "a leading '_' is reserved" if TOPIC_NAME.match(name) else "1 to 200 of [A-Za-z0-9_.:-] are allowed"
        raise StoreError(Reason.TOPIC_NAME_INVALID, f"topic: {name[:220]!r} is no topic name: {what}", field="topic")


def check_settings(declared: Declared, *, topic: str = "", in_config: bool = False) -> None:
    """Checks the settings declared on `topic`; `in_config`: in the configuration file. Raises StoreError
    INVALID_ARGUMENT that names the wrong setting, or the two that contradict each other."""
    settings = TopicSettings(**declared)  # type: ignore[arg-type]  # names and values of its fields
    try:
        key_paths(settings)
    except ValueError as error:
        raise refusal("settings", "key", str(error)) from None
    if len(settings.index) > INDEXES_MAX:
        raise refusal("settings", "index", f"{len(settings.index)} indexes are more than the limit of {INDEXES_MAX}")
    try:
        index_paths(settings)
    except ValueError as error:
        raise refusal("settings", "index", str(error)) from None
    if len(settings.separator) != 1 or settings.separator == b"=":
        raise refusal(
            "settings", "separator", f"{show('separator', settings.separator)} is not one byte other than '='"
        )
    message_type = settings.message_type
    if settings.separator != BUILT_IN.separator and message_type not in (MessageType.FIX, MessageType.NVFIX):
        shown = show("separator", settings.separator)
        raise refusal("settings", "separator", f"{shown} has no meaning with message_type = {message_type.value!r}")
    check_limits_and_values(declared)
    if topic and settings.dead_letter == topic:
        raise refusal("settings", "dead_letter", f"{topic} is the topic itself")
    if in_config:
        for field in sorted(UNUSED_DELETES):
            if value := declared.get(field):
                raise refusal(
                    "settings",
                    field,
                    f"{show(field, value)} contradicts that the topic is declared in the configuration file, which "
                    "keeps it (rule T1)",
                )
