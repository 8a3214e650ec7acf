"""A `sow_client.Client` without a server: the methods that the `sow` command calls, on dictionaries, with errors on
demand.

Close enough for the command's tests: json topics with one key field or none, no expiry, no real journal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self, TypeVar

from sow.durations import parse_micros
from sow.v1 import types_pb2
from sow_client import (
    AlreadyExists,
    BackupMade,
    Change,
    Compacted,
    Deleted,
    EffectiveSetting,
    Gap,
    IndexStatus,
    InvalidArgument,
    Page,
    Published,
    QueryFooter,
    QueryHeader,
    QueryPlan,
    Record,
    RecordBatch,
    Refusal,
    Repaired,
    ReplicationStatus,
    Restamped,
    SowError,
    Status,
    Topic,
    TopicChecked,
    TopicSettings,
    TopicStatistics,
    UnsoundRow,
    Verified,
    ViewDefinition,
    ViewStatus,
)
from sow_client._grouping import divided
from tests.support.fakes.fake_inspecting import FakeInspecting
from tests.support.fakes.fake_publishing import FakePublishing
from tests.support.fakes.fake_results import (
    NEVER_MICROS,
    NOW,
    NOW_MICROS,
    FakeDurable,
    FakeResult,
    FakeSubscription,
    Row,
    Table,
    check_names,
)

T = TypeVar("T")


def given(parameters: Mapping[str, object] | None) -> dict[str, object]:
    """The argument of a call as it is noted: only where there is one."""
    return {} if parameters is None else {"parameters": parameters}


class FakeClient(FakePublishing, FakeInspecting):
    """Owns its tables; a test looks into them, or sets `fails_with` to have every call raise that."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Table] = {}
        self.sequence = 0
        self.query_batch_size = 2
        self.views: dict[str, ViewDefinition] = {}
        self.statuses: dict[str, ViewStatus] = {}
        """The states of views that are not complete."""
        self.builds: list[bool] = []
        """For each look at a view: whether it is complete; none left: it is."""
        self.coming: list[Change] = []
        """The messages of subscriptions after their snapshots."""
        self.gaps: list[Gap] = []
        """The state of a durable subscription before its first message."""
        self.acknowledged: list[str] = []
        """Bookmarks, in order."""
        self.effective: tuple[EffectiveSetting, ...] = ()
        """The settings in force on described topics."""
        self.links = ReplicationStatus("nyc-1", 0, (), ())
        self.verified: list[Verified] = []
        self.unsound: list[UnsoundRow] = []
        self.repaired: list[Repaired] = []
        self.others: dict[str, Self | SowError] = {}
        """The other cells, of which this one is `a`; an error: it does not answer."""
        self.interruption: SowError | None = None
        """The errors that interrupt each subscription before its first message, for a moment."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.calls.append(("close", {}))

    # ---- cells ----

    @property
    def here(self) -> Self:
        return self

    def in_each_cell(self, ask: Callable[[Self], T]) -> dict[str, T | SowError]:
        if not self.others:
            return {"": ask(self)}
        found: dict[str, T | SowError] = {"a": ask(self)}
        for cell, other in self.others.items():
            found[cell] = other if isinstance(other, SowError) else ask(other)
        return found

    # ---- topics ----

    def add(self, name: str, /, *, records: Sequence[dict[str, object]] = (), **settings: object) -> Table:
        """A topic as a test wants it, keyed by `/id` unless told otherwise, with these records."""
        table = self.tables[name] = Table(TopicSettings(**({"key": ("/id",)} | settings)))  # type: ignore[arg-type]  # names of its fields
        for record in records:
            self.publish(name, json.dumps(record, separators=(",", ":")).encode())
        return table

    def topics(self, *, with_statistics: bool = False) -> list[Topic]:
        self._called("topics", with_statistics=with_statistics)
        return [self._topic(name) for name in sorted(self.tables)]

    def describe_topic(self, name: str) -> Topic:
        self._called("describe_topic", name=name)
        planned = 300 * 2**20 if self.effective else None
        return replace(self._topic(name), effective=self.effective, planned_journal_bytes=planned)

    def create_topic(self, name: str, **settings: object) -> Topic:
        check_names("create_topic", settings)
        self._called("create_topic", name=name, **settings)
        if name in self.tables:
            raise AlreadyExists(f"topic {name!r} exists", reason="TOPIC_EXISTS", details={"field": "name"})
        self.tables[name] = Table(TopicSettings(**settings))  # type: ignore[arg-type]  # as above
        return self._topic(name)

    def create_view(
        self,
        name: str,
        *,
        source: str,
        where: str | None = None,
        group_by: Iterable[str] | None = None,
        select: Iterable[str] | None = None,
        **settings: object,
    ) -> Topic:
        check_names("create_view", settings)
        definition = {"source": source, "where": where, "group_by": group_by, "select": select}
        self._called("create_view", name=name, **definition, **settings)
        if name in self.tables:
            raise AlreadyExists(f"topic {name!r} exists", reason="TOPIC_EXISTS", details={"field": "name"})
        self.tables[name] = Table(TopicSettings(**settings))  # type: ignore[arg-type]  # as above
        selected = tuple([part for text in select or () for part in divided(text)])
        self.views[name] = ViewDefinition(source, tuple(group_by or ()), selected, where or "")
        return self._topic(name)

    def alter_topic(self, name: str, **settings: object) -> Topic:
        check_names("alter_topic", settings)
        self._called("alter_topic", name=name, **settings)
        table = self._table(name)
        table.settings = replace(table.settings, **settings)  # type: ignore[arg-type]  # as above
        return self._topic(name)

    def delete_topic(self, name: str, *, force: bool = False, here: bool = False) -> int:
        self._called("delete_topic", name=name, force=force, **({"here": True} if here else {}))
        rows = len(self._table(name).rows)
        del self.tables[name]
        return rows

    # ---- reading ----

    def get(self, topic: str, key: str) -> Record | None:
        return next(iter(self.get_many(topic, [key])), None)

    def get_many(
        self,
        topic: str,
        keys: Iterable[str],
        *,
        select: object = None,
        exclude: object = None,
        touch: object = None,
        touch_below: object = None,
        min_position: object = None,
    ) -> list[Record]:
        self._called(
            "get_many",
            topic=topic,
            select=select,
            exclude=exclude,
            touch=touch,
            touch_below=touch_below,
            min_position=min_position,
        )
        rows = self._table(topic).rows
        return list(self._batch(topic, [key for key in keys if key in rows], keys_only=False))

    def query(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the client's public name
        parameters: Mapping[str, object] | None = None,
        *,
        order_by: Sequence[str] | None = None,
        keys: Iterable[str] | None = None,
        select: object = None,
        exclude: object = None,
        keys_only: bool = False,
        skip_n: int = 0,
        top_n: int | None = None,
        min_position: object = None,
        with_plan: bool = False,
        group_by: object = None,
        aggregate: object = None,
        having: object = None,
    ) -> FakeResult:
        """Of a query for groups, the records of the topic are the results."""
        options = {"select": select, "exclude": exclude, "keys_only": keys_only, "skip_n": skip_n, "top_n": top_n}
        if group_by or aggregate or having:
            options |= {"group_by": group_by, "aggregate": aggregate, "having": having}
        self._called(
            "query", filter=filter, **given(parameters), order_by=order_by, min_position=min_position, **options
        )
        matched = sorted(key for key in self._matching(topic, filter, parameters) if keys is None or key in keys)
        chosen = matched[skip_n:][:top_n]
        size = self.query_batch_size
        batches = [
            self._batch(topic, chosen[start : start + size], keys_only=keys_only)
            for start in range(0, len(chosen), size)
        ]
        groups = len(matched) if group_by or aggregate else 0
        return FakeResult(batches, matched=len(matched), returned=len(chosen), with_plan=with_plan, groups=groups)

    def page(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the client's public name
        parameters: Mapping[str, object] | None = None,
        *,
        page_size: int,
        page_token: str = "",
        **options: object,
    ) -> Page:
        check_names("page", options)
        self._called("page", filter=filter, **given(parameters), page_size=page_size, page_token=page_token, **options)
        behind = [key for key in sorted(self._matching(topic, filter, parameters)) if key > page_token]
        records = list(self._batch(topic, behind[:page_size], keys_only=bool(options.get("keys_only"))))
        token = records[-1].key if len(behind) > page_size else ""
        footer = QueryFooter(len(records), len(records), len(records), token)
        return Page(records, token, QueryHeader("e.7", NOW_MICROS), footer)

    def count(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the client's public name
        parameters: Mapping[str, object] | None = None,
        *,
        min_position: object = None,
        timeout: object = None,
        on_absent_fields: object = None,
    ) -> int:
        self._called("count", topic=topic, **given(parameters), min_position=min_position)
        return len(self._matching(topic, filter, parameters))

    def explain(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the client's public name
        parameters: Mapping[str, object] | None = None,
        **options: object,
    ) -> QueryPlan:
        check_names("explain", options)
        self._called("explain", filter=filter, **given(parameters), **options)
        matched = len(self._matching(topic, filter, parameters))
        return QueryPlan(
            access="index",
            index_path="/price",
            probes=1,
            index_entries=matched,
            scanned=matched,
            matched=matched,
            returned=matched,
            filter=filter or "",
            order_by="",
        )

    def _matching(self, topic: str, wanted: str | None, parameters: Mapping[str, object] | None) -> list[str]:
        rows = self._table(topic).rows
        if not wanted:
            return list(rows)
        # Only here, as tests that start the command in processes would import half of the server each time.
        from sow_server.filters import FilterError, Meta, compile_filter, parse
        from sow_server.filters.parameters import parameters as bound

        try:
            values = {name: value for name, value in (parameters or {}).items() if isinstance(value, (str, int, float))}
            predicate = compile_filter(parse(wanted, bound(values)))
        except FilterError as error:
            raise InvalidArgument(error.message, reason="FILTER_INVALID", details={"field": "filter"}) from None
        return [
            key
            for key, row in rows.items()
            if predicate.matches(
                json.loads(row.payload), Meta(key, row.version, NOW_MICROS, row.expire_time_micros, topic, NOW_MICROS)
            )
        ]

    # ---- following ----

    def subscribe(
        self,
        topic: str | None,
        filter: str | None,  # noqa: A002 - the client's public name
        parameters: Mapping[str, object] | None = None,
        *,
        on_interruption: Callable[[SowError | None], object] | None = None,
        **options: object,
    ) -> FakeSubscription:
        check_names("subscribe", options)
        self._called("subscribe", topic=topic, filter=filter, **given(parameters), **options)
        self._interrupt(on_interruption)
        return FakeSubscription(self.coming)

    def _interrupt(self, on_interruption: Callable[[SowError | None], object] | None) -> None:
        if self.interruption is not None and on_interruption is not None:
            on_interruption(self.interruption)
            on_interruption(None)

    def sow_and_subscribe(
        self,
        topic: str | None,
        filter: str | None,  # noqa: A002 - the client's public name
        parameters: Mapping[str, object] | None = None,
        *,
        on_interruption: Callable[[SowError | None], object] | None = None,
        **options: object,
    ) -> FakeSubscription:
        check_names("sow_and_subscribe", options)
        self._called("sow_and_subscribe", topic=topic, filter=filter, **given(parameters), **options)
        self._interrupt(on_interruption)
        names = [topic] if topic is not None else sorted(self.tables)
        snapshot = [
            Change("sow", record=record, topic=name)
            for name in names
            for record in self._batch(name, sorted(self._table(name).rows), keys_only=False)
        ]
        end = Change("snapshot_end", bookmark=f"epoch.{self.sequence}", topic=topic or "")
        return FakeSubscription([*snapshot, end, *self.coming])

    def record(self, topic: str, key: str, payload: bytes, *, expire_time_micros: int | None = None) -> Record:
        """A record as a message of a subscription carries it."""
        self.sequence += 1
        row = Row(payload, NOW_MICROS + self.sequence, expire_time_micros, self.sequence)
        return next(iter(self._batch_of(topic, [key], [row], keys_only=False)))

    def durable(
        self,
        topic: str,
        name: str,
        filter: str | None = None,  # noqa: A002 - the client's public name
        parameters: Mapping[str, object] | None = None,
        *,
        on_interruption: Callable[[SowError | None], object] | None = None,
        on_gap: Callable[[Gap], object] | None = None,
        **options: object,
    ) -> FakeDurable:
        check_names("durable", options)
        self._called("durable", topic=topic, name=name, filter=filter, **given(parameters), **options)
        self._interrupt(on_interruption)
        for gap in self.gaps:
            if on_gap is not None:
                on_gap(gap)
        return FakeDurable(self.coming, self.acknowledged)

    # ---- deleting and touching ----

    def sow_delete(
        self,
        topic: str,
        *,
        keys: Sequence[str] | None = None,
        only_if_versions: Sequence[int] | None = None,
        filter: str | None = None,  # noqa: A002 - the client's public name
        parameters: Mapping[str, object] | None = None,
        data: bytes | None = None,
        all: bool = False,  # noqa: A002 - the client's public name
        dry_run: bool = False,
        on_progress: Callable[[Deleted], None] | None = None,
    ) -> Deleted:
        self._called("sow_delete", keys=keys, filter=filter, **given(parameters), data=data, all=all, dry_run=dry_run)
        table = self._table(topic)
        chosen = self._matching(topic, filter, parameters) if all or filter is not None else list(keys or ())
        if data is not None:
            chosen = [str(json.loads(data)[table.settings.key[0][1:]])]
        matched = [key for key in chosen if key in table.rows]
        if only_if_versions is not None:
            wanted = dict(zip(chosen, only_if_versions, strict=True))
            matched = [key for key in matched if table.rows[key].version == wanted[key]]
        if not dry_run:
            for key in matched:
                del table.rows[key]
            self.sequence += len(matched)
        done = Deleted(len(matched), 0 if dry_run else len(matched), 0 if dry_run or not matched else self.sequence)
        if on_progress is not None:
            on_progress(done)
        return done

    def restamp(
        self,
        topic: str,
        mode: str,
        *,
        ttl: str | None = None,
        filter: str | None = None,  # noqa: A002 - the client's public name
        parameters: Mapping[str, object] | None = None,
        dry_run: bool = False,
        on_progress: Callable[[Restamped], None] | None = None,
    ) -> Restamped:
        self._called("restamp", topic=topic, mode=mode, ttl=ttl, filter=filter, **given(parameters), dry_run=dry_run)
        rows = self._table(topic).rows
        if not dry_run:
            for row in rows.values():
                row.expire_time_micros = None if ttl is None else NOW_MICROS + parse_micros(ttl)
            self.sequence += len(rows)
        done = Restamped(len(rows), 0 if dry_run else len(rows), 0 if dry_run or not rows else self.sequence)
        if on_progress is not None:
            on_progress(done)
        return done

    def check_topic(
        self,
        topic: str,
        *,
        repair: bool = False,
        rows_max: int = 100,
        on_progress: Callable[[TopicChecked], None] | None = None,
    ) -> TopicChecked:
        self._called("check_topic", topic=topic, repair=repair, rows_max=rows_max)
        rows = tuple(self.unsound[:rows_max])
        done = TopicChecked(10, len(self.unsound), len(self.unsound) if repair else 0, rows)
        if on_progress is not None:
            on_progress(done)
        return done

    def touch(
        self,
        topic: str,
        key: Sequence[str],
        *,
        ttl: object = None,
        expire_at: datetime | None = None,
        only: str | None = None,
        only_if_versions: Sequence[int] | None = None,
        atomic: bool = False,
    ) -> list[Published | Refusal]:
        of = {"only_if_versions": only_if_versions}
        self._called("touch", ttl=ttl, expire_at=expire_at, only=only, atomic=atomic, **of)
        rows = self._table(topic).rows
        outcomes: list[Published | Refusal] = []
        for index, one in enumerate(key):
            if one not in rows:
                outcomes.append(Refusal(index, "RECORD_NOT_FOUND", "no live record of that key"))
                continue
            lasts = isinstance(ttl, str) and ttl != "never"
            rows[one].expire_time_micros = NOW_MICROS + parse_micros(str(ttl)) if lasts else None
            is_off = self._table(topic).settings.expiration == "disabled"
            outcomes.append(self._published(topic, one, ttl_ignored=is_off and ttl is not None))
        return outcomes

    # ---- the server ----

    def status(self) -> Status:
        self._called("status")
        return Status(
            instance="fake-1",
            instance_id="0123",
            journal_epoch="4567",
            server_version="0.1.0",
            state="serving",
            failure="",
            ready_time=NOW,
            clock_time=NOW + timedelta(seconds=90),
            sweep_paused=False,
            last_sequence=self.sequence,
            live_records=sum(len(table.rows) for table in self.tables.values()),
            overdue_records=0,
            topics=len(self.tables),
            disk_bytes=123_456,
            disk_free_bytes=1_234_567_890,
        )

    def compact(self) -> Compacted:
        self._called("compact")
        return Compacted(4_096_000, 1_024)

    def replication_status(self) -> ReplicationStatus:
        self._called("replication_status")
        return self.links

    def verify_replication(
        self,
        peer: str,
        topics: Sequence[str] | None = None,
        *,
        keys_max: int = 100,
        on_topic: Callable[[Verified], object] | None = None,
    ) -> list[Verified]:
        self._called("verify_replication", peer=peer, topics=topics, keys_max=keys_max)
        for one in self.verified:
            if on_topic is not None:
                on_topic(one)
        return self.verified

    def repair_replication(
        self,
        peer: str,
        topics: Sequence[str] | None = None,
        *,
        on_topic: Callable[[Repaired], object] | None = None,
    ) -> list[Repaired]:
        self._called("repair_replication", peer=peer, topics=topics)
        for one in self.repaired:
            if on_topic is not None:
                on_topic(one)
        return self.repaired

    def add_peer(
        self,
        name: str,
        address: str = "",
        *,
        accept: bool = False,
        topics_pattern: str = "",
        sync: bool = False,
        filter_text: str = "",
        ca: str = "",
        certificate: str = "",
        key: str = "",
        token_file: str = "",
        replace: bool = False,
    ) -> None:
        given = {
            "accept": accept,
            "topics_pattern": topics_pattern,
            "sync": sync,
            "filter_text": filter_text,
            "ca": ca,
            "certificate": certificate,
            "key": key,
            "token_file": token_file,
            "replace": replace,
        }
        self._called("add_peer", name=name, address=address, **{name: value for name, value in given.items() if value})

    def remove_peer(self, name: str) -> None:
        self._called("remove_peer", name=name)

    def pause_peer(self, name: str) -> None:
        self._called("pause_peer", name=name)

    def resume_peer(self, name: str) -> None:
        self._called("resume_peer", name=name)

    def backup(self, name: str) -> BackupMade:
        self._called("backup", name=name)
        return BackupMade(name, 17, 4_096)

    # ---- inside ----

    def _topic(self, name: str) -> Topic:
        table = self._table(name)
        indexes = tuple(IndexStatus(path, complete=not number) for number, path in enumerate(table.settings.index))
        size = sum(len(key) + len(row.payload) for key, row in table.rows.items())
        statistics = TopicStatistics(len(table.rows), size, 0, 2 * size, 7, 3)
        view, status = self.views.get(name), None
        if view is not None:
            complete = self.builds.pop(0) if self.builds else True
            status = self.statuses.get(name, ViewStatus(complete, 7, len(table.rows), 0))
        return Topic(name, table.settings, False, NOW, statistics, indexes, view=view, view_status=status)

    def _batch(self, topic: str, keys: Sequence[str], *, keys_only: bool) -> RecordBatch:
        return self._batch_of(topic, keys, [self._table(topic).rows[key] for key in keys], keys_only=keys_only)

    @staticmethod
    def _batch_of(topic: str, keys: Sequence[str], rows: Sequence[Row], *, keys_only: bool) -> RecordBatch:
        return RecordBatch(
            topic,
            types_pb2.RecordColumns(
                key=keys,
                payload=[] if keys_only else [row.payload for row in rows],
                version=[row.version for row in rows],
                publish_time_micros=[NOW_MICROS - 5_000_000 for _ in rows],
                expire_time_micros=[
                    NEVER_MICROS if row.expire_time_micros is None else row.expire_time_micros for row in rows
                ],
                sequence=[row.sequence for row in rows],
                origins=["fake-1"],
            ),
        )
