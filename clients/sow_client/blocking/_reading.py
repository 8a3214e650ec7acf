# Generated from aio/_reading.py by clients/generate_blocking.py. Change that file, then run `make client`.
"""Reading records: by key, by filter, page by page."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from sow.v1 import sow_pb2
from sow_client import _lines, _reads, _statuses, _timeouts
from sow_client._contract import needed
from sow_client._grouping import Expressions
from sow_client._keys import Key, key_text, key_texts
from sow_client._parameters import Parameters
from sow_client._queries import QUERY_ATTEMPTS_MAX, QUERY_RETRY_SECONDS, Answer
from sow_client._records import OnAbsentFields, Page, QueryPlan, Record, RecordBatch, Ttl, invalid
from sow_client.blocking._calls import Calls
from sow_client.errors import SowError, Unavailable

if TYPE_CHECKING:
    from sow_client._frames import MetadataName


class Reading(Calls):
    """The calls that read records."""

    def get(
        self,
        topic: str,
        key: Key,
        *,
        touch: Ttl | None = None,
        touch_below: Ttl | None = None,
        min_position: str | None = None,
    ) -> Record | None:
        """The live record of a key, or None. `touch`, `touch_below` and `min_position` as in `get_many`.

        The key is the text of `Record.key`, or the value of the key field: `get("orders", 1)` and `get("orders", "1")`
        are the same. With several key fields it is a tuple of all values: `get("flights", ("LH", 400))`.
        """
        keys = [key_text(key)]
        found = self.get_many(topic, keys, touch=touch, touch_below=touch_below, min_position=min_position)
        return found[0] if found else None

    def get_many(
        self,
        topic: str,
        keys: Iterable[Key],
        *,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        touch: Ttl | None = None,
        touch_below: Ttl | None = None,
        min_position: str | None = None,
    ) -> list[Record]:
        """The live records of the keys, in the order of the keys; keys without a record are left out.

        `select` or `exclude`: payload fields to return, as paths such as "/a/b". Up to 10,000 keys are read at one
        instant; more keys take several requests. `touch` gives the records this lifetime, and they come with their new
        expire times. With `touch_below` only those that have less than this left are touched. Each 1,000 keys are then
        a request, and a commit if a record is touched.

        `min_position`: a bookmark, such as `Published.bookmark`, perhaps of another instance. The answer shows at least
        everything up to it; if the server does not have it within a second, the call raises Unavailable (BEHIND).

        Rules: L20, F10.
        """
        select, exclude = _reads.texts(select, "select"), _reads.texts(exclude, "exclude")
        limit = _reads.RECORDS_PER_REQUEST_MAX if touch is None else _reads.TOUCHED_TOGETHER_MAX
        found: list[Record] = []
        for chunk in _reads.chunks(key_texts(keys), limit):
            request = _reads.get_request(
                topic, chunk, select, exclude, touch=touch, touch_below=touch_below, min_position=min_position
            )
            response = self._call(self._sow.Get, request, renews=touch is not None)
            found += _reads.records(topic, response)
        return found

    def query(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        order_by: str | Iterable[str] | None = None,
        keys: Iterable[Key] | None = None,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        keys_only: bool = False,
        batch_size: int = 1_000,
        skip_n: int = 0,
        top_n: int | None = None,
        min_position: str | None = None,
        timeout: float | None = None,
        with_plan: bool = False,
        group_by: Expressions | None = None,
        aggregate: Expressions | None = None,
        having: str | None = None,
    ) -> QueryResult:
        """The live records of a topic that match `filter`, from one instant.

        `parameters`: the values of the names in the filter, {"name": user} for "/Name = :name". A value from outside
        belongs there, and never into the filter's text. It is a text, an int of any size, a float, a bool, None, or a
        list of these for IN. `order_by`: one or more of "/price", "/price DESC", "@expire_time" …; by default the order
        of keys. `keys`: only these. `select` or `exclude`: payload fields to return, as paths; `keys_only`: no
        payloads; `skip_n`, `top_n`: a part of the result; `batch_size`: records in one message, and so in a batch of
        `QueryResult.batches`; `min_position`: as for `get_many`. The call is made when the first record is asked for,
        and repeated if it breaks before it. `timeout`: raises DeadlineExceeded if the whole answer has not come within
        so many seconds; None: an answer may take as long as it takes. `with_plan`: the result's `plan` tells after the
        last record how they were found.

        With `group_by` or `aggregate` the answer has a result for each group, as a record whose document has the names
        of both: `group_by=["/account"], aggregate={"n": "COUNT(*)", "px": "SUM(/px * /qty) / SUM(/qty)"}`. Each is
        expressions by name, or texts such as "COUNT(*) AS n"; a field names itself. `having` is a condition over the
        results, such as "/n > 10". `order_by`, `skip_n` and `top_n` are then about results, by their names.

        Rules: Q1, Q2, Q3, Q9, Q11, Q12.
        """
        request = _reads.query_request(
            topic,
            filter,
            parameters,
            order_by=order_by,
            keys=keys,
            select=select,
            exclude=exclude,
            keys_only=keys_only,
            batch_size=batch_size,
            skip_n=skip_n,
            top_n=top_n,
            min_position=min_position,
            with_plan=with_plan,
            group_by=group_by,
            aggregate=aggregate,
            having=having,
        )
        return self._query(request, _timeouts.perhaps(timeout, "timeout"))

    def page(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        page_size: int,
        page_token: str = "",
        order_by: str | Iterable[str] | None = None,
        keys_only: bool = False,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        min_position: str | None = None,
        timeout: float | None = None,
    ) -> Page:
        """One page of the records that match `filter`, in key order or in `order_by`, stable under concurrent change.

        Begin without a token, and continue with `next_page_token` and the same arguments until it is empty. Each page
        is of an instant of its own. With `order_by` the server reads all matching records for each page.
        `min_position`: as for `get_many`. `timeout`: as for `count`.

        Rule: Q4.
        """
        if page_size < 1:
            raise invalid("page_size", f"{page_size} is less than 1")
        request = _reads.query_request(
            topic,
            filter,
            parameters,
            order_by=order_by,
            keys_only=keys_only,
            select=select,
            exclude=exclude,
            page_size=page_size,
            page_token=page_token,
            min_position=min_position,
        )
        progress = _reads.QueryProgress(topic)
        records: list[Record] = []
        with closing(self._batches(request, progress, self._one_answer(timeout))) as batches:
            for batch in batches:
                records.extend(batch)
        return progress.page(records)

    def count(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        min_position: str | None = None,
        timeout: float | None = None,
        on_absent_fields: OnAbsentFields | None = None,
    ) -> int:
        """The number of live records of a topic, or of those that match `filter`.

        `min_position`: as for `get_many`. `timeout`: raises DeadlineExceeded if there is no answer within so many
        seconds; None: the client's `timeout`. `on_absent_fields` gets the fields of the filter in which no record has a
        value, if there are any: perhaps they are mistyped.

        Rule: Q10.
        """
        progress = _reads.QueryProgress(topic)
        request = _reads.query_request(topic, filter, parameters, count_only=True, min_position=min_position)
        with closing(self._batches(request, progress, self._one_answer(timeout))) as batches:
            for _ in batches:
                raise _statuses.malformed("records, where only their number was asked for")
        if on_absent_fields is not None and progress.absent_fields:
            on_absent_fields(progress.absent_fields)
        return progress.matched

    def explain(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        order_by: str | Iterable[str] | None = None,
        keys: Iterable[Key] | None = None,
        skip_n: int = 0,
        top_n: int | None = None,
        run: bool = True,
        timeout: float | None = None,
        group_by: Expressions | None = None,
        aggregate: Expressions | None = None,
        having: str | None = None,
    ) -> QueryPlan:
        """The plan of a query: how it finds its records, and how much it reads. The query runs, but sends no records.
        Without `run` it is only planned, and the figures of what was read and matched are 0. `timeout`: as
        for `count`.

        Rule: Q3.
        """
        request = _reads.query_request(
            topic,
            filter,
            parameters,
            order_by=order_by,
            explain=run,
            keys=keys,
            skip_n=skip_n,
            top_n=top_n,
            plan_only=not run,
            group_by=group_by,
            aggregate=aggregate,
            having=having,
        )
        progress = _reads.QueryProgress(topic)
        with closing(self._batches(request, progress, self._one_answer(timeout))) as batches:
            for _ in batches:
                raise _statuses.malformed("records, where only the plan was asked for")
        return progress.explained()

    def _query(self, request: sow_pb2.QueryRequest, timeout: float | None) -> QueryResult:
        progress = _reads.QueryProgress(request.topic)
        return QueryResult(progress, self._batches(request, progress, timeout))

    def _one_answer(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else _timeouts.seconds(timeout, "timeout")

    def _batches(
        self,
        request: sow_pb2.QueryRequest,
        progress: _reads.QueryProgress,
        seconds: float | None = None,
    ) -> Generator[RecordBatch, None, None]:
        needs, way = needed(request), self._cells.way(request.topic)
        give_up = None if seconds is None else time.monotonic() + seconds
        attempt = 1
        while True:
            # A longer time bounds no wait for a connection, and the client may look for a cause then.
            wait = None if seconds is None or seconds >= self._connect_timeout else seconds
            line, transport = self._ready(way, wait, needs=needs), way.place.transport
            left = None if give_up is None else max(0.0, give_up - time.monotonic())
            call = _lines.at(line, self._sow.Query)(request, timeout=left)
            try:
                for response in call:
                    batch = progress.batch(response)
                    if batch is not None:
                        yield batch
                progress.finished()
                return
            except (grpc.RpcError, SowError) as error:
                translated = transport.explained(progress.broken(error), line)
                transport.doubt(translated.reason)
                if not progress.yielded:
                    if way.leads(translated):
                        continue
                    if (pause := way.pause(translated)) is not None:
                        time.sleep(pause)
                        continue
                translated = way.told(translated)
                passes = isinstance(translated, Unavailable) and translated.reason != "BEHIND"
                again = passes and not progress.yielded and attempt < QUERY_ATTEMPTS_MAX
                if not again:
                    raise translated from (None if translated is error else error)
                progress.restart()
                if give_up is not None and time.monotonic() + QUERY_RETRY_SECONDS * attempt >= give_up:
                    raise translated from (None if translated is error else error)
                time.sleep(QUERY_RETRY_SECONDS * attempt)
                attempt += 1
            finally:
                call.cancel()


class QueryResult(Answer):
    """The answer to a query, read once: an iterator of records.

    `header` is known from the first record on, `footer` after the last. Leaving the loop early, `close`, or the end of
    a `with` block ends the call and the server's work for it. Raises Unavailable (STREAM_CUT or UNREACHABLE)
    when the answer breaks off. It does not ask again by itself then: a second call would show another instant.

    Rule: Q1.
    """

    def to_arrow(self, *, schema: object | None = None, metadata: Iterable[MetadataName] = ("key",)) -> Any:
        """The records as a `pyarrow.Table`, made of columns without an object for each record. It reads the answer to
        its end.

        Each field of the JSON documents is a column: a text stays text, also where it looks like a time; numbers are
        int64 where all are whole, else float64; objects are structs, arrays lists. A field of several types is text,
        of each value its JSON. Payloads that are no JSON objects are one column, `payload`. `schema`, a
        `pyarrow.Schema`, names the fields and their types instead. `metadata` become columns with "_" before their
        names, such as "_key": any of key, version, publish_time, expire_time, origin, sequence. Needs `sow[arrow]`.
        """
        from sow_client import _frames  # lazily, as all of its users: few programs need it

        batches = list(self.batches())
        return _frames.to_arrow(batches, schema, metadata)

    def to_pandas(self, *, schema: object | None = None, metadata: Iterable[MetadataName] = ("key",)) -> Any:
        """The records as a `pandas.DataFrame`; the arguments are those of `to_arrow`. Whole numbers and bools of which
        some are missing get the types Int64 and boolean, and are not rounded. Needs `sow[pandas]`."""
        from sow_client import _frames

        return _frames.to_pandas(self.to_arrow(schema=schema, metadata=metadata))

    def to_polars(self, *, schema: object | None = None, metadata: Iterable[MetadataName] = ("key",)) -> Any:
        """The records as a `polars.DataFrame`; the arguments are those of `to_arrow`. Needs `sow[polars]`."""
        from sow_client import _frames

        return _frames.to_polars(self.to_arrow(schema=schema, metadata=metadata))

    def close(self) -> None:
        """Ends the call."""
        self._call.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
