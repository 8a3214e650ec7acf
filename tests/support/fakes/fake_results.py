"""Tables of a `FakeClient`, and the objects that its calls return: results, subscriptions, consumers of durables."""

import inspect
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

from sow_client import (
    Change,
    Client,
    DurableSettingsArguments,
    QueryFooter,
    QueryHeader,
    QueryPlan,
    RecordBatch,
    TopicSettings,
    TopicSettingsArguments,
)

NOW_MICROS = 1_900_000_000_000_000
NOW = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=NOW_MICROS)
NEVER_MICROS = 2**63 - 1


@dataclass(slots=True)
class Row:
    """A stored record."""

    payload: bytes
    version: int
    expire_time_micros: int | None
    sequence: int


@dataclass(slots=True)
class Table:
    """A stored topic."""

    settings: TopicSettings
    rows: dict[str, Row] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Merge:
    """The further effects of a delta publish (rule P2)."""

    unset: Sequence[str] | None

    def into(self, base: bytes, delta: bytes) -> bytes:
        """The merged document."""
        # Only here, as tests that start the command in processes would import half of the server each time.
        from sow_server.engine.formats.paths import path_tree
        from sow_server.engine.formats.topic_formats import format_of
        from sow_server.engine.values.keys import parse_path
        from sow_server.engine.values.model import TopicSettings as EngineSettings

        result = format_of(EngineSettings()).merge(
            base, delta, path_tree([parse_path(one) for one in self.unset or ()])
        )
        assert isinstance(result, bytes), result
        return result


def check_names(method: str, named: Mapping[str, object]) -> None:
    """Raises TypeError where the client's method does not take an argument of such a name."""
    known = set(inspect.signature(getattr(Client, method)).parameters)
    if "named" in known:
        known |= TopicSettingsArguments.__annotations__.keys()
    if "settings" in known:
        known |= DurableSettingsArguments.__annotations__.keys()
    if unknown := named.keys() - known:
        raise TypeError(f"{method} takes no {sorted(unknown)}")


class FakeResult:
    """The answer to a query."""

    def __init__(
        self, batches: Sequence[RecordBatch], *, matched: int, returned: int, with_plan: bool = False, groups: int = 0
    ) -> None:
        self._batches = batches
        self.plan = QueryPlan("index", "/price", 1, matched, matched, matched, returned, "", "") if with_plan else None
        self.header = QueryHeader("epoch:1", NOW_MICROS)
        self.footer = QueryFooter(matched, returned, matched, "", (), groups, ungrouped=2 if groups else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def batches(self) -> Iterator[RecordBatch]:
        return iter(self._batches)


class FakeSubscription:
    """Tells its changes, then waits like the real one until it is closed: `FakeSubscription.waits_seconds` at most."""

    waits_seconds = 30.0

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = iter(changes)
        self._closed = threading.Event()
        self.bookmark: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        change = None if self._closed.is_set() else next(self._changes, None)
        if change is None:
            # In short steps: a signal that comes just before the system call would be seen only after it.
            deadline = time.monotonic() + self.waits_seconds
            while not self._closed.wait(0.05):
                assert time.monotonic() < deadline, "nobody closed the subscription"
            raise StopIteration
        self.bookmark = change.bookmark or self.bookmark
        return change


class FakeDurable(FakeSubscription):
    """The same for a durable subscription; acknowledgements go to a list."""

    def __init__(self, changes: Sequence[Change], acknowledged: list[str]) -> None:
        super().__init__(changes)
        self._acknowledged = acknowledged

    def acknowledge(self, done: Change) -> None:
        if done.bookmark is not None:
            self._acknowledged.append(done.bookmark)
