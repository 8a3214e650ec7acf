"""Live results as `sow subscribe` shows them: the rows that the server keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sow_cli.grouping import Grouping
from sow_cli.live import LiveDisplay
from sow_client import Change, FailedPrecondition, LiveResult, SowError


def rows_of(
    asked: Callable[..., LiveResult] | None,
    grouping: Grouping,
    order_by: tuple[str, ...],
    top: int | None,
    shown: LiveDisplay | None,
    *,
    conflation: str | None,
    select: list[str] | None,
    tell: Callable[[SowError | None], None],
) -> LiveResult | None:
    """The rows that the server keeps, also for the live table. None: there are none, or the server is older than that,
    and sends all records. `tell` hears of interruptions."""
    if asked is None:
        return None
    try:
        rows = asked(
            order_by=", ".join(order_by) or None,
            top_n=top,
            conflation=conflation,
            select=select,
            on_interruption=tell,
            **grouping.arguments,
        )
    except FailedPrecondition as error:
        if error.reason != "SERVER_TOO_OLD" or grouping.given:
            raise
        return None
    if shown is not None:
        shown.follow(rows.list)
    return rows


def as_messages(rows: LiveResult) -> Iterator[Change]:
    """A live result as the messages of a subscription."""
    topic = ""
    for record in rows.list():
        topic = record.topic
        yield Change("sow", record=record, topic=topic)
    yield Change("snapshot_end", bookmark=rows.bookmark, topic=topic, absent_fields=rows.absent_fields)
    yield from rows
