"""A store with views, each held against brute force over the records of its source.

rig = ViewRig(tmp_path)
rig.create_topic("orders", TopicSettings())
rig.create_view("totals", "orders", group_by=["/account"], select=["COUNT(*) AS n"])
rig.put("orders", "1", b'{"account":"A"}')
rig.check("totals")                                  # its content is that of Q11 and Q12 over `orders`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.layout import group_state_prefix, ordered_prefix
from sow_server.engine.disk.rocks import VIEWS
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import header
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.fields import value_at
from sow_server.engine.values.model import Record
from sow_server.engine.values.views import ViewDefinition
from sow_server.filters.aggregates import record_values
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.filters.tree import Path as FieldPath
from sow_server.query.aggregating import Aggregator, aggregating
from sow_server.query.filtering import record_filter
from sow_server.query.sort_memory import SortMemory
from sow_server.query.view_plans import view_plan
from tests.support.stores.stores import FakeTime, Rig

Row = tuple[bytes, bytes]
"""A record key, and a stored value."""


def named(text: str) -> tuple[str, str]:
    """`COUNT(*) AS n` as a name and an expression."""
    expression, _, name = text.rpartition(" AS ")
    return (name, expression) if expression else ("", text)


def definition(
    source: str, *, group_by: Sequence[str] = (), select: Sequence[str] = (), where: str = ""
) -> ViewDefinition:
    """A definition from texts with AS."""
    return ViewDefinition(source, tuple(map(named, group_by)), tuple(map(named, select)), where)


class ViewRig(Rig):
    """A rig whose store has views."""

    def __init__(self, path: Path, *, options: StoreOptions | None = None, time: FakeTime | None = None) -> None:
        super().__init__(path, options=replace(options or StoreOptions(), plan_of=view_plan), time=time)

    def create_view(
        self,
        name: str,
        source: str,
        *,
        group_by: Sequence[str] = (),
        select: Sequence[str] = (),
        where: str = "",
        built: bool = True,
        **settings: object,
    ) -> Topic:
        """Makes a view; without `built` only the step that creates it is done. Raises StoreError."""
        answers: list[Topic | StoreError] = []
        wanted = definition(source, group_by=group_by, select=select, where=where)
        self.store.administration.create_topic(name, settings, view=wanted).then(answers.append)
        if built:
            return self.answer(answers)
        self.turn()
        (answer,) = answers
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def content(self, view: str) -> dict[str, dict[str, object]]:
        """The documents of a view by key, as a cut shows them."""
        return {key.decode(): json.loads(one.payload) for key, one in self.live(view).items()}

    def check(self, view: str) -> None:
        """Asserts that a view is what brute force makes of the stored records of its source, and that what is kept
        beside it is no more than that (rules V2, V4)."""
        topic = self.topic(view)
        assert topic.view is not None
        wanted, ungrouped = brute_force(self.topic(topic.view.source), topic.view, self.stored(topic.view.source))
        found = {key: one.payload for key, one in self.stored(view).items()}
        assert found == wanted
        assert topic.ungrouped == ungrouped
        assert topic.statistics.records == len(wanted)
        assert topic.statistics.record_bytes == sum(len(key) + len(payload) for key, payload in wanted.items())
        states = self.rows(VIEWS, group_state_prefix(topic.prefix), group_state_prefix(topic.prefix) + b"\xff" * 40)
        assert len(states) == (0 if _is_per_record(topic.view) else len(wanted))
        if not wanted:
            assert self.rows(VIEWS, ordered_prefix(topic.prefix, 0, b"")[:5], topic.stop) == []


def brute_force(source: Topic, view: ViewDefinition, records: dict[bytes, Record]) -> tuple[dict[bytes, bytes], int]:
    """The payloads of a view by key, and how many records are in no group."""
    rows = [(key, _stored(one)) for key, one in records.items()]
    if view.where:
        matches = record_filter(source, view.where, 0).matches
        rows = [(key, value) for key, value in rows if matches(key, value)]
    values = None if view.group_by else record_values(view.select)
    if values is not None:
        found: dict[bytes, bytes] = {}
        for key, value in rows:
            document = source.format.decode(value[40:])
            picked: dict[str, object] = {}
            for name, tree in zip(values.names, values.trees, strict=True):
                assert isinstance(tree, FieldPath), "the tests choose fields"
                picked[name] = value_at(document, tree.steps)
            found[key] = json.dumps(picked, ensure_ascii=False, separators=(",", ":")).encode()
        return found, 0
    gathering = Aggregator(
        aggregating(source, view.group_by, view.select, "", "", UNRESTRICTED), 0, SortMemory(), clock=lambda: 0.0
    )
    if rows:
        gathering.add([key for key, _ in rows], [value for _, value in rows])
    while gathering.settle() is not None:
        pass
    results = {key: value[40:] for _, key, value in gathering.rows()}
    ungrouped = gathering.ungrouped
    counts = _counts(source, view, rows)
    gathering.close()
    if b"" in results:  # no record has an empty key
        del results[b""]
        ungrouped += counts[b""]
    if not view.group_by and not rows:
        results.clear()  # a group without records has no record (rule V4)
    return results, ungrouped


def _counts(source: Topic, view: ViewDefinition, rows: Sequence[Row]) -> dict[bytes, int]:
    """How many records each group has."""
    asked = aggregating(source, view.group_by, (("n", "COUNT(*)"),), "", "", UNRESTRICTED)
    gathering = Aggregator(asked, 0, SortMemory(), clock=lambda: 0.0)
    if rows:
        gathering.add([key for key, _ in rows], [value for _, value in rows])
    while gathering.settle() is not None:
        pass
    found = {key: int(json.loads(value[40:])["n"]) for _, key, value in gathering.rows()}
    gathering.close()
    return found


def _is_per_record(view: ViewDefinition) -> bool:
    return not view.group_by and record_values(view.select) is not None


def _stored(one: Record) -> bytes:
    return (
        header(
            origin=one.origin,
            payload_bytes=len(one.payload),
            version=one.version,
            publish_time=one.publish_time_micros,
            expire_time=one.expire_time_micros,
            sequence=one.sequence,
        )
        + one.payload
    )
