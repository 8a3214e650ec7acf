"""The publishing of a `FakeClient`: one by one, many at once, and as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self

from sow.durations import parse_micros
from sow_client import Ack, NotFound, Published, Refusal
from tests.support.fakes.fake_results import NOW_MICROS, Merge, Row, Table
from tests.support.fakes.fake_retention import FakeRetention


class FakePublishing(FakeRetention):
    """Owns the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Table] = {}
        self.sequence = 0

    def publish(
        self,
        topic: str,
        data: bytes,
        *,
        key: str | None = None,
        ttl: object = None,
        expire_at: object = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        only_if_version: int | None = None,
        durability: str | None = None,
    ) -> Published:
        self._called(
            "publish",
            key=key,
            ttl=ttl,
            expire_at=expire_at,
            keep_ttl=keep_ttl,
            extend_ttl=extend_ttl,
            durability=durability,
        )
        condition = (only_if_absent, only_if_present, only_if_version)
        outcome = self._apply(topic, data, key, ttl, expire_at, 0, condition=condition)
        if isinstance(outcome, Refusal):
            raise outcome.error()
        return outcome

    def delta_publish(
        self,
        topic: str,
        data: bytes,
        *,
        unset: Sequence[str] | None = None,
        key: str | None = None,
        ttl: object = None,
        expire_at: object = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        only_if_version: int | None = None,
        durability: str | None = None,
    ) -> Published:
        self._called("delta_publish", unset=unset, key=key, ttl=ttl, keep_ttl=keep_ttl, extend_ttl=extend_ttl)
        condition = (only_if_absent, only_if_present, only_if_version)
        outcome = self._apply(topic, data, key, ttl, expire_at, 0, Merge(unset), condition=condition)
        if isinstance(outcome, Refusal):
            raise outcome.error()
        return outcome

    def publish_many(
        self,
        topic: str,
        documents: Iterable[bytes],
        *,
        keys: Sequence[str] | None = None,
        ttl: object = None,
        expire_at: object = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        durability: str | None = None,
        atomic: bool = False,
        delta: bool = False,
        unset: Sequence[str] | None = None,
        refusals: str = "raise",
    ) -> list[Published | Refusal]:
        payloads = list(documents)
        self._called("publish_many", records=len(payloads), ttl=ttl, expire_at=expire_at, atomic=atomic)
        before = dict(self._table(topic).rows)
        merge = Merge(unset) if delta else None
        outcomes: list[Published | Refusal] = [
            self._apply(
                topic,
                payload,
                None if keys is None else keys[index],
                ttl,
                expire_at,
                index,
                merge,
                condition=(only_if_absent, only_if_present, None),
            )
            for index, payload in enumerate(payloads)
        ]
        if atomic and any(isinstance(one, Refusal) for one in outcomes):
            self._table(topic).rows = before
            aborted = "another record of the request was refused"
            return [
                one if isinstance(one, Refusal) else Refusal(index, "ATOMIC_ABORTED", aborted)
                for index, one in enumerate(outcomes)
            ]
        return outcomes

    def publisher(
        self,
        topic: str,
        *,
        ttl: object = None,
        expire_at: object = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        durability: str | None = None,
        batch_records: int = 1_000,
        on_ack: Callable[[Ack], object] | None = None,
        on_refusal: Callable[[Refusal], None],
        delta: bool = False,
        unset: Sequence[str] | None = None,
    ) -> FakePublisher:
        self._called(
            "publisher",
            ttl=ttl,
            expire_at=expire_at,
            keep_ttl=keep_ttl,
            extend_ttl=extend_ttl,
            batch_records=batch_records,
        )
        return FakePublisher(self, topic, ttl, on_refusal, Merge(unset) if delta else None)

    def _apply(
        self,
        topic: str,
        data: bytes,
        key: str | None,
        ttl: object,
        expire_at: object,
        index: int,
        merge: Merge | None = None,
        *,
        condition: tuple[bool, bool, int | None] = (False, False, None),
    ) -> Published | Refusal:
        table = self._table(topic)
        settings = table.settings
        if settings.message_type == "json":
            try:
                document = json.loads(data)
            except ValueError as error:
                return Refusal(index, "PAYLOAD_MALFORMED", f"not JSON: {error}")
            if settings.key:
                value = document.get(settings.key[0][1:])
                if value is None:
                    return Refusal(index, "KEY_FIELD_MISSING", f"key field {settings.key[0]} is missing or null")
                key = str(value)
        if key is None:
            return Refusal(index, "KEY_REQUIRED", f"topic {topic} has no key fields")
        absent, present, version = condition
        live = table.rows.get(key)
        if (absent and live) or (present and not live) or (version and (live is None or live.version != version)):
            return Refusal(index, "CONDITION_FAILED", "the condition does not hold")
        self.sequence += 1
        expire: int | None = None
        if isinstance(expire_at, datetime):
            expire = round(expire_at.timestamp() * 1e6)
        elif isinstance(expire_at, int):
            expire = expire_at
        elif isinstance(ttl, str) and ttl != "never":
            expire = NOW_MICROS + parse_micros(ttl)
        if merge is not None and key in table.rows:
            data = merge.into(table.rows[key].payload, data)
        table.rows[key] = Row(data, NOW_MICROS + self.sequence, expire, self.sequence)
        return self._published(topic, key, ttl_ignored=expire is not None and settings.expiration == "disabled")

    def _table(self, name: str) -> Table:
        try:
            return self.tables[name]
        except KeyError:
            raise NotFound(
                f"there is no topic {name!r}", reason="TOPIC_NOT_FOUND", details={"field": "topic"}
            ) from None

    def _published(self, topic: str, key: str, *, ttl_ignored: bool = False) -> Published:
        row = self._table(topic).rows[key]
        return Published(key, row.version, row.expire_time_micros, row.sequence, ttl_ignored, duplicate=False)


class FakePublisher:
    """Applies each record at once; `breaks_at` raises in place of the record of that position."""

    breaks_at: int | None = None
    breaks_with: BaseException = KeyboardInterrupt()

    def __init__(
        self,
        client: FakePublishing,
        topic: str,
        ttl: object,
        on_refusal: Callable[[Refusal], None],
        merge: Merge | None,
    ) -> None:
        self._client = client
        self._merge = merge
        self._topic = topic
        self._ttl = ttl
        self._on_refusal = on_refusal
        self.applied = 0
        self.duplicates = 0
        self.refused = 0
        self.ttls_ignored = 0
        self.removed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    @property
    def acknowledged(self) -> int:
        return self.applied + self.duplicates + self.refused

    def remove(self, key: str | None = None, *, data: bytes | None = None) -> None:
        table = self._client._table(self._topic)
        if key is None:
            assert data is not None
            key = str(json.loads(data).get(table.settings.key[0][1:])) if table.settings.key else ""
        if key == "":
            self.refused += 1
            self._on_refusal(Refusal(self.acknowledged - 1, "KEY_REQUIRED", "key: is empty"))
        else:
            self.applied += 1
            self.removed += table.rows.pop(key, None) is not None

    def publish(self, data: bytes, *, key: str | None = None, ttl: object = None, expire_at: int | None = None) -> None:
        position = self.acknowledged
        if position == self.breaks_at:
            raise self.breaks_with
        outcome = self._client._apply(
            self._topic, data, key, self._ttl if ttl is None else ttl, expire_at, position, self._merge
        )
        if isinstance(outcome, Refusal):
            self.refused += 1
            self._on_refusal(outcome)
        else:
            self.applied += 1
            self.ttls_ignored += outcome.ttl_ignored
