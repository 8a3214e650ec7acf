"""Converts the request of a live result (rule S10): the query whose result is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from sow.v1 import sow_pb2
from sow_server.access.caller import Granted
from sow_server.engine.doors import Reads
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.stored import header
from sow_server.engine.values.model import MICROS
from sow_server.engine.values.turns import CALLER
from sow_server.query.filtering import RecordFilter
from sow_server.query.ordering import Order, callers_order
from sow_server.query.projection import projection
from sow_server.query.scan import Query, Scan
from sow_server.query.sort_memory import SortMemory
from sow_server.services.wire import convert
from sow_server.services.wire.filter_values import filter_values
from sow_server.services.wire.topic_filters import AskedView, PlannedSnapshot, TopicFilters
from sow_server.subscriptions.frames import ChangeReason, Row
from sow_server.subscriptions.live.groups import layout
from sow_server.subscriptions.request import PROGRESS_MICROS, Request, check
from sow_server.subscriptions.results.lists import AskedList
from sow_server.subscriptions.results.window import Place

ROWS_MAX: Final = 10_000
"""The most rows of a live result, with those that a list skips."""
LIST_CONFLATION_MICROS: Final = MICROS // 10
READ_RECORDS: Final = 500
"""Records of one piece of reading, for each of which a place is found."""


def is_asked(message: sow_pb2.SubscribeRequest) -> bool:
    """True if the request is for a live result."""
    return bool(message.order_by or message.top_n or message.skip_n) or groups(message)


def groups(message: sow_pb2.SubscribeRequest) -> bool:
    """True if the rows of the result are results of groups."""
    return bool(message.group_by or message.aggregate or message.having)


def check_result(message: sow_pb2.SubscribeRequest) -> None:
    """Raises StoreError naming the field that does not go with a live result."""
    grouped = groups(message)
    if not grouped and not message.order_by:
        field = "top_n" if message.top_n else "skip_n"
        raise convert.invalid(field, "only with order_by; snapshot_max bounds a snapshot in the order of keys")
    what = "group_by" if message.group_by else "aggregate" if message.aggregate else "having" if grouped else "order_by"
    if not message.topic or message.topic_pattern:
        raise convert.invalid(what, "only with one topic")
    if not message.sow:
        raise convert.invalid(what, "only with sow")
    start = message.WhichOneof("start")
    for given, field in (
        (message.changes, "changes"),
        (message.delta, "delta"),
        (message.HasField("durable"), "durable"),
        (start is not None, start or ""),
        (message.HasField("held"), "held"),
        (bool(message.view), "view"),
        (bool(message.snapshot_max), "snapshot_max"),
        (grouped and bool(message.select.include or message.select.exclude), "select"),
    ):
        if given:
            raise convert.invalid(what, f"cannot be combined with {field}")
    if not message.top_n and not grouped:
        raise convert.invalid("top_n", "is needed with order_by")
    if message.top_n + message.skip_n > ROWS_MAX:
        raise convert.invalid("top_n", f"skip_n and top_n together must be at most {ROWS_MAX}")


class Feed(NamedTuple):
    """The subscription that feeds a live result."""

    request: Request
    name: bytes
    """Names what its caller may see, and the fields that it asks for."""
    filter: RecordFilter | None
    projection: Projection | None
    """Leaves out hidden fields alone: those that were not asked for may be needed for the order."""


def feed(message: sow_pb2.SubscribeRequest, reading: Reads, granted: Granted) -> Feed:
    """The subscription to the records of which the result is made. Raises StoreError."""
    topic, restriction = granted
    given, select = filter_values(message.parameters), message.select
    filters = TopicFilters(reading.cuts, AskedView(message.filter, given), READ_RECORDS, lambda _: restriction)
    named = TopicFilters(
        reading.cuts,
        AskedView("", include=select.include, exclude=select.exclude),
        READ_RECORDS,
        lambda _: restriction,
    )
    asked = Request(
        filters.view,
        filters.snapshot,
        topic=message.topic,
        oof=True,
        conflation_micros=message.conflation_micros,
        progress_micros=message.progress_micros or PROGRESS_MICROS,
        batch_size=message.batch_size or 1000,
    )
    check(asked, selects=False)
    view = filters.view(topic)
    request = Request(filters.view, filters.snapshot, topic=message.topic, oof=True, with_due=True)
    return Feed(request, named.name(topic), filters.filter(topic), view.projection)


def asked_list(
    message: sow_pb2.SubscribeRequest, reading: Reads, granted: Granted, sorts: SortMemory | None = None
) -> AskedList:
    """The list of a request that `check_result` has passed. `sorts`: the memory that ordered queries share, in which
    its readings sort, too (rule Q2). Parsing and compiling may take milliseconds. Raises StoreError."""
    topic, restriction = granted
    order = callers_order(topic, message.order_by, restriction.hidden)
    assert order is not None, "it was checked"
    fed = feed(message, reading, granted)
    shown = projection(topic, message.select.include, message.select.exclude, restriction.hidden)

    def best(count: int) -> PlannedSnapshot:
        query = Query(
            topic,
            filter=fed.filter,
            order=order,
            projection=fed.projection,
            batch_size=READ_RECORDS,
            top_n=count + 1,  # one more tells whether there are more
        )
        return PlannedSnapshot(Scan(reading.cuts, query, sorts, CALLER.get()), fed.name, records_max=count)

    def show(row: Row) -> Row:
        payload = row.payload if shown is None else topic.format.project(row.payload, shown)
        return row._replace(payload=payload, reason=ChangeReason.NONE)

    skip, top, conflation = message.skip_n, message.top_n, message.conflation_micros or LIST_CONFLATION_MICROS
    text = "" if fed.filter is None else fed.filter.text
    shared = ("list", topic.id, layout(topic), fed.name, text, order.text, skip, top, conflation)
    return AskedList(shared, topic, fed.request, fed.name, conflation, best, _placing(order), show, skip, top)


def _placing(order: Order) -> Callable[[Row], Place]:
    if not order.reads_headers:
        return lambda row: order.place(row.key, b"", row.payload)

    def place(row: Row) -> Place:
        head = header(
            origin=row.origin,
            payload_bytes=len(row.payload),
            version=row.version,
            publish_time=row.publish_time,
            expire_time=row.expire_time,
            sequence=row.sequence,
        )
        return order.place(row.key, head, row.payload)

    return place
