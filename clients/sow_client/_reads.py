"""Reading and following: arguments into requests, responses into values. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, TypeAlias

from sow.v1 import sow_pb2, types_pb2
from sow_client._grouping import Expressions, expressions
from sow_client._keys import Key, checked_list, key_texts
from sow_client._lifetimes import lifetime_message, zoned_micros
from sow_client._parameters import Parameters, parameter_values
from sow_client._records import (
    EARLIEST,
    NEVER_MICROS,
    AccessName,
    Page,
    QueryFooter,
    QueryHeader,
    QueryPlan,
    Record,
    RecordBatch,
    Start,
    Ttl,
    invalid,
    ttl_micros,
)
from sow_client._statuses import cut, malformed, stream_error
from sow_client.errors import SowError

RECORDS_PER_REQUEST_MAX = 10_000
"""The most records, or keys, in one request (rule K8)."""
TOUCHED_TOGETHER_MAX: Final = 1_000
"""The most records that a read renews in one request (rule L20), and that a lease holds in a topic (rule L21)."""


def projection(select: Iterable[str] | None, exclude: Iterable[str] | None) -> sow_pb2.Projection | None:
    """The payload fields to return; None: the whole payload."""
    if select is None and exclude is None:
        return None
    if select is not None and exclude is not None:
        raise invalid("exclude", "give select or exclude, not both")
    return sow_pb2.Projection(include=texts(select, "select"), exclude=texts(exclude, "exclude"))


def texts(values: Iterable[str] | None, field: str) -> list[str] | None:
    """The texts as a list, which can be read twice; None stays None."""
    if values is None:
        return None
    made = list(checked_list(values, field, of="texts"))
    for value in made:
        if not isinstance(value, str):
            raise TypeError(f"{field}: {value!r} is of type {type(value).__name__}; each must be a text")
    return made


def get_request(
    topic: str,
    keys: Sequence[str],
    select: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    *,
    touch: Ttl | None = None,
    touch_below: Ttl | None = None,
    min_position: str | None = None,
) -> sow_pb2.GetRequest:
    """Get by keys, and perhaps renew (rule L20)."""
    if touch_below is not None and touch is None:
        raise invalid("touch_below", "needs the lifetime to give, in touch")
    return sow_pb2.GetRequest(
        topic=topic,
        keys=keys,
        select=projection(select, exclude),
        touch=lifetime_message(touch, None),
        touch_below_micros=None if touch_below is None else ttl_micros(touch_below, "touch_below"),
        min_position=min_position or "",
    )


def records(topic: str, response: sow_pb2.GetResponse) -> list[Record]:
    """The records of a get; they share one set of columns, like those of a query."""
    found = response.records
    origins = list(dict.fromkeys(record.origin for record in found))
    columns = types_pb2.RecordColumns(
        key=[record.key for record in found],
        payload=[record.payload for record in found],
        version=[record.version for record in found],
        publish_time_micros=[record.publish_time_micros for record in found],
        expire_time_micros=[
            record.expire_time_micros if record.HasField("expire_time_micros") else NEVER_MICROS for record in found
        ],
        sequence=[record.sequence for record in found],
        origin=[origins.index(record.origin) for record in found] if len(origins) > 1 else [],
        origins=origins,
        message_type=found[0].message_type if found else "",
        fix_separator=found[0].fix_separator if found else "",
    )
    return list(RecordBatch(topic, columns))


def chunks(texts: Sequence[str], size_max: int = RECORDS_PER_REQUEST_MAX) -> Iterator[Sequence[str]]:
    """Keys in lists of at most 10,000 (rule K8), or of another number."""
    for start in range(0, len(texts), size_max):
        yield texts[start : start + size_max]


def changing_filter(value: str) -> str:
    """The filter of a request that changes records. A blank filter would match all records, so it is refused."""
    if not value.strip():
        raise invalid("filter", "is empty; for every record write 'true'", reason="FILTER_INVALID")
    return value


def order_text(order_by: str | Iterable[str] | None) -> str:
    """The sort order as one text such as "/price DESC, /symbol"; empty: the order of keys."""
    if order_by is None or isinstance(order_by, str):
        return order_by or ""
    return ", ".join(order_by)


def query_request(
    topic: str,
    filter_text: str | None = None,
    parameters: Parameters | None = None,
    *,
    order_by: str | Iterable[str] | None = None,
    explain: bool = False,
    keys: Iterable[Key] | None = None,
    select: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    keys_only: bool = False,
    count_only: bool = False,
    batch_size: int = 0,
    page_size: int = 0,
    page_token: str = "",
    skip_n: int = 0,
    top_n: int | None = None,
    min_position: str | None = None,
    with_plan: bool = False,
    plan_only: bool = False,
    group_by: Expressions | None = None,
    aggregate: Expressions | None = None,
    having: str | None = None,
) -> sow_pb2.QueryRequest:
    """A query (rule Q2). An empty list of keys is refused: on the wire it would ask for every record."""
    chosen = None if keys is None else key_texts(keys)
    if chosen == []:
        raise invalid("keys", "is empty; leave it out to ask for every record")
    if top_n is not None and top_n < 1:
        raise invalid("top_n", f"{top_n} is less than 1")
    for name, value in (("batch_size", batch_size), ("page_size", page_size), ("skip_n", skip_n)):
        if value < 0:
            raise invalid(name, f"{value} is negative")
    return sow_pb2.QueryRequest(
        topic=topic,
        keys=chosen,
        select=projection(select, exclude),
        batch_size=batch_size,
        keys_only=keys_only,
        count_only=count_only,
        page_size=page_size,
        page_token=page_token,
        skip_n=skip_n,
        top_n=top_n or 0,
        filter=filter_text or "",
        parameters=parameter_values(parameters),
        order_by=order_text(order_by),
        explain=explain,
        min_position=min_position or "",
        with_plan=with_plan,
        plan_only=plan_only,
        group_by=expressions(group_by, "group_by"),
        aggregate=expressions(aggregate, "aggregate"),
        having=having or "",
    )


WAYS: Final[Mapping[str, str]] = {
    "points": "looks records up by their keys",
    "key_ranges": "reads ranges of keys",
    "index": "reads an index, then its records",
    "scan": "reads every record",
    "nothing": "reads nothing: no record can match",
}
"""The access of a plan in words, for the command and the console."""


def way_of(plan: QueryPlan) -> str:
    """One line about the way that found records, for the command and the console."""
    way = WAYS.get(plan.access)
    if way is None:  # also for a caller that may see a part of the records: the way would tell of the others
        return "the server does not tell how the records were found"
    if plan.index_path:
        way = f"reads the index on {plan.index_path}, then its records"
    records = "1 record" if plan.scanned == 1 else f"{plan.scanned:,} records"
    return f"{way}: {records} read, {plan.index_entries:,} entries of indexes"


_ACCESS: Final[Mapping[int, AccessName]] = {
    sow_pb2.QueryPlan.ACCESS_POINTS: "points",
    sow_pb2.QueryPlan.ACCESS_KEY_RANGES: "key_ranges",
    sow_pb2.QueryPlan.ACCESS_INDEX: "index",
    sow_pb2.QueryPlan.ACCESS_SCAN: "scan",
    sow_pb2.QueryPlan.ACCESS_NOTHING: "nothing",
}


def _plan(footer: sow_pb2.QueryFooter) -> QueryPlan:
    plan = footer.plan
    return QueryPlan(
        access=_ACCESS.get(plan.access, "unknown"),
        index_path=plan.index_path,
        probes=plan.probes,
        index_entries=plan.index_entries,
        scanned=footer.scanned,
        matched=footer.matched,
        returned=footer.returned,
        filter=plan.filter,
        order_by=plan.order_by,
        absent_fields=tuple(footer.absent_fields),
    )


PatternStart: TypeAlias = Start | Mapping[str, str]
"""A `Start`. Over several cells: the mapping from cells to bookmarks that `JoinedSubscription.bookmark` gives."""


class QueryProgress:
    """The progress of the answer to a query: header, then batches, then footer (rule Q1)."""

    __slots__ = ("footer", "header", "plan", "topic", "yielded")

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.header: QueryHeader | None = None
        self.footer: QueryFooter | None = None
        self.plan: QueryPlan | None = None
        self.yielded = False

    def restart(self) -> None:
        """The call is made again. Allowed only while nothing was yielded: a second call answers from another
        instant."""
        assert not self.yielded, "records of two instants would be mixed (rule Q1)"
        self.header = self.footer = None

    def batch(self, response: sow_pb2.QueryResponse) -> RecordBatch | None:
        """The batch of a response; None for the header and the footer, which are kept."""
        kind = response.WhichOneof("response")
        if kind == "batch":
            if self.header is None:
                raise malformed("records before the header")
            self.yielded = True
            return RecordBatch(self.topic, response.batch)
        if kind == "header":
            self.header = QueryHeader(response.header.bookmark, response.header.as_of_micros)
        elif kind == "footer":
            footer = response.footer
            self.footer = QueryFooter(
                footer.matched,
                footer.returned,
                footer.scanned,
                footer.next_page_token,
                tuple(footer.absent_fields),
                footer.groups,
                footer.ungrouped,
            )
            self.plan = _plan(footer) if footer.HasField("plan") else None
        return None

    def broken(self, error: BaseException) -> SowError:
        """The error of the stream. A connection that broke between records gives STREAM_CUT, not UNREACHABLE."""
        translated = stream_error(error, "the answer to the query")
        if self.yielded and translated.reason == "UNREACHABLE":
            return cut(f"the answer to the query ({translated.message})")
        return translated

    def finished(self) -> None:
        """The stream has ended with status OK; raises Unavailable (STREAM_CUT) when the answer is incomplete."""
        if self.footer is None:
            raise cut("the answer to the query")

    @property
    def matched(self) -> int:
        """Live records that matched."""
        return 0 if self.footer is None else self.footer.matched

    @property
    def absent_fields(self) -> tuple[str, ...]:
        """Fields in which no record that was read has a value."""
        return () if self.footer is None else self.footer.absent_fields

    def explained(self) -> QueryPlan:
        """The plan that was asked for."""
        self.finished()
        if self.plan is None:
            raise malformed("no plan, which was asked for")
        return self.plan

    def page(self, records: list[Record]) -> Page:
        """The whole answer as a page."""
        self.finished()
        if self.header is None or self.footer is None:
            raise malformed("an answer without a header")
        return Page(records, self.footer.next_page_token, self.header, self.footer)


def subscribe_request(
    topic: str | None,
    filter_text: str | None,
    parameters: Parameters | None = None,
    *,
    topic_pattern: str | None,
    sow: bool,
    oof: bool,
    delta: bool,
    changes: bool,
    start: PatternStart | None,
    conflation: Ttl | None,
    progress: Ttl | None,
    empty_deltas: bool,
    select: Iterable[str] | None,
    exclude: Iterable[str] | None,
    batch_size: int,
    snapshot_max: int | None = None,
) -> sow_pb2.SubscribeRequest:
    """A subscription to a topic or to the topics of a pattern. The server checks which options exclude each other."""
    if (topic is None) == (topic_pattern is None):
        raise invalid("topic", "give exactly one of topic and topic_pattern")
    if batch_size < 0:
        raise invalid("batch_size", f"{batch_size} is negative")
    if snapshot_max is not None and snapshot_max < 1:
        raise invalid("snapshot_max", f"{snapshot_max} is less than 1")
    request = sow_pb2.SubscribeRequest(
        topic=topic or "",
        topic_pattern=topic_pattern or "",
        filter=filter_text or "",
        parameters=parameter_values(parameters),
        sow=sow,
        oof=oof,
        delta=delta,
        changes=changes,
        conflation_micros=0 if conflation is None else ttl_micros(conflation, "conflation"),
        progress_micros=0 if progress is None else ttl_micros(progress, "progress"),
        empty_deltas=empty_deltas,
        select=projection(select, exclude),
        batch_size=batch_size,
        snapshot_max=snapshot_max or 0,
    )
    match start:
        case None:
            pass
        case datetime():
            request.start_time_micros = zoned_micros(start, "start")
        case "earliest":  # no bookmark looks like it
            request.earliest = True
        case str():
            request.bookmark = start
        case Mapping():
            raise invalid("start", "has the bookmarks of cells, which only topic_pattern needs: a topic is in one cell")
        case _:
            if start is not EARLIEST:
                raise invalid("start", f"a {type(start).__name__} is not a bookmark, a datetime or EARLIEST")
            request.earliest = True
    return request


def starts_of_cells(start: PatternStart | None) -> tuple[Mapping[str, str] | None, Start | None]:
    """The bookmarks of cells that a start has, or the start itself. Raises InvalidArgument."""
    if not isinstance(start, Mapping):
        return None, start
    if not start:
        raise invalid("start", "is a mapping without a cell")
    given: Iterable[tuple[object, object]] = start.items()  # mypy has not checked every program
    for cell, bookmark in given:
        if not (isinstance(cell, str) and isinstance(bookmark, str) and cell and bookmark):
            raise invalid("start", f"{cell!r}: {bookmark!r} is not the name of a cell with a bookmark")
    return dict(start), None
