"""The topics of a stream, and the ranges of their journals in a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sow_client import ChangesPlan, Topic
from sow_spark.errors import SowSourceError
from sow_spark.options import Connecting, Reading
from sow_spark.over_cells import selected
from sow_spark.stream_instances import InstanceInUse
from sow_spark.stream_offsets import (
    Offset,
    apart,
    bookmark_of,
    epoch_of,
    is_behind,
    marked,
    plain,
    sequence_of,
    topics_of,
)
from sow_spark.stream_pins import check_loss, tell_loss


class Plans:
    """Owns what is known of the topics. It is pickled before any call, as its reader is."""

    def __init__(self, reading: Reading, instance: InstanceInUse) -> None:
        self.present: Mapping[str, Topic] = {}
        """The topics that were there at the last look, by name. With several topics alone."""
        self._reading = reading
        self._instance = instance

    def is_foreign(self, offset: Offset) -> bool:
        """True if an offset is a position in the journal of another instance than the one in use."""
        return self._instance.epoch not in (None, offset["epoch"])

    def plan(
        self,
        topic: str,
        doing: str,
        start: str | datetime,
        end: str | None = None,
        max_entries: int = 0,
        max_bytes: int = 0,
    ) -> ChangesPlan:
        """A range of a topic. Raises SowSourceError."""
        return self._instance.call(
            doing,
            lambda client: client.plan_changes(
                topic, start=start, end=end, max_entries=max_entries, max_bytes=max_bytes
            ),
        )

    def plan_from(
        self, topic: str, start: Offset, end: str | None, max_entries: int = 0, max_bytes: int = 0
    ) -> ChangesPlan:
        """The range of a topic after an offset. If its journal does not reach back to it, the range after the earliest
        position, if the topic is new to the query, or the options allow that."""
        at = marked(start, topic)
        if end is not None and topic in apart(start) and is_behind(plain(at), end):
            return ChangesPlan(bookmark_of(start), end, end, end, 0, 0, 0, ())  # nothing of it lies in the range
        if not (self._instance.several or self.is_foreign(start)):
            # One instance that is taken for the one of the offset, and is another one, refuses it: it may lack changes.
            at = plain(at)
        try:
            return self.plan(topic, "planning a micro-batch", at, end, max_entries, max_bytes)
        except SowSourceError as error:
            if error.reason == "BOOKMARK_OTHER_EPOCH" and self._instance.several:
                raise SowSourceError(
                    "UNREACHABLE",
                    f"the instance with the journal {start['epoch']} does not serve, and "
                    f"{self._instance.connecting.server} does not know where to go on in its place",
                    "wait for it, or link the instances in both directions; "
                    "if the topic has moved to another cell, start a query with a new checkpoint",
                ) from None
            is_new = topic not in topics_of(start, self._reading.topic)
            if not (is_new and error.reason == "BOOKMARK_TOO_OLD"):
                check_loss(error, self._reading, topic, plain(at))
        earliest = self.plan(topic, "looking for the earliest change", "earliest", None, max_entries, max_bytes)
        if end is None:
            return earliest
        if epoch_of(earliest.start) != epoch_of(end) or is_behind(earliest.start, end):
            # All of the range is gone.
            return ChangesPlan(end, end, earliest.head, earliest.earliest, 0, 0, earliest.entries_left, ())
        return self.plan(topic, "planning a micro-batch", earliest.start, end, max_entries, max_bytes)

    def topics(self) -> dict[str, Topic]:
        """The topics that are there now, by name."""
        if not self._reading.several:
            name = self._reading.topic
            return {name: self._instance.call("looking at it", lambda client: client.describe_topic(name))}
        self.present = {}
        if cell := self._reading.cell:
            answers = self._instance.call("looking at its cell", lambda client: client.placement().cell)
            check_cell(self._instance.connecting, cell, answers)
        topics = self._instance.call("looking at them", lambda client: client.topics())
        self.present = found = {topic.name: topic for topic in selected(topics, self._reading)}
        return found

    def check_created(self, offset: Offset, present: Mapping[str, Topic]) -> None:
        """Raises or logs DATA_LOST if a topic is no longer the one of the offset."""
        for name, created in topics_of(offset, self._reading.topic).items():
            topic = present.get(name)
            if topic is None:
                if self._reading.topic_pattern is not None and not self._reading.cell:
                    tell_loss(self._reading, name, bookmark_of(offset), "the topic was deleted")
            elif created is not None and topic.create_time.isoformat() != created:
                tell_loss(
                    self._reading,
                    name,
                    bookmark_of(offset),
                    f"the topic was deleted, and another one created at {topic.create_time.isoformat()}",
                )

    def ends(
        self, start: Offset, present: Mapping[str, Topic], end: str | None, max_entries: int, max_bytes: int
    ) -> tuple[str, dict[str, ChangesPlan]]:
        """The end of the next micro-batch, and the range of each topic."""
        if self._reading.several:
            return self._next_of_several(start, present, end, max_entries, max_bytes)
        name = self._reading.topic
        plan = self.plan_from(name, start, end, max_entries, max_bytes)
        return plan.end, {name: plan}

    def _next_of_several(
        self, start: Offset, present: Mapping[str, Topic], end: str | None, max_entries: int, max_bytes: int
    ) -> tuple[str, dict[str, ChangesPlan]]:
        """The end of a micro-batch of all topics, and the range of each. A limit is divided among the
        topics by what each has, and the first one that reaches its part ends the micro-batch for all. It never ends
        before the position of the others, where a topic that has come is behind them."""
        plans: dict[str, ChangesPlan] = {}
        for name in present:
            plan = plans[name] = self.plan_from(name, start, end)
            end = end or plan.head  # one end for all, although more is written meanwhile
        assert end is not None, "there is a topic"
        entries, size = sum(plan.entries for plan in plans.values()), sum(plan.bytes for plan in plans.values())
        if 0 < max_entries < entries or 0 < max_bytes < size:
            limited = [
                self.plan_from(
                    name,
                    start,
                    end,
                    max(1, max_entries * plan.entries // entries) if max_entries else 0,
                    max(1, max_bytes * plan.bytes // size) if max_bytes and size else 0,
                ).end
                for name, plan in plans.items()
                if plan.entries
            ]
            others = topics_of(start, "").keys() - apart(start)
            begun = [plan.start for name, plan in plans.items() if name in others]
            limit = min(limited, key=sequence_of)
            limit = end = max(limit, min(begun, key=sequence_of, default=limit), key=sequence_of)
            plans = {name: self.plan_from(name, start, limit) for name in present}
        return end, plans


def check_cell(to: Connecting, cell: str, answers: str) -> None:
    """Raises SowSourceError if another cell answers: an address that leads to several cells, now to one and then to
    another, would have one read twice, and another not at all."""
    if answers != cell:
        raise SowSourceError(
            "TOPIC_ELSEWHERE",
            f"{to.server} is in the cell {cell}, and now the cell {answers!r} answers",
            "give the option server the addresses of one cell",
        )
