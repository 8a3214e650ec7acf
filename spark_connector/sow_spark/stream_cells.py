"""Streaming reads of several topics, which may be in several cells (rule C24).

Each cell has a journal of its own, so the offset of a query has a position for each cell, and each cell has a
`ChangesReader`, whose guarantees hold there. There is no order of changes over cells. Servers without a placement have
one journal: the offsets are then those of a `ChangesReader`.

    [1]  A cell comes into a query with its first topic there, and is read from its earliest change. It begins with a
         micro-batch that has none of its rows, because the start of each range must be in the checkpoint.
    [2]  A topic that has left a cell goes on in the one that has it now, behind the bookmark up to which it was read.
         The new cell has to know this position, by its marks (rule F18), or else the changes are lost (DATA_LOST). It
         begins there with a micro-batch that has none of its rows, as in [1]. A micro-batch that was planned before is
         read up to the head there, so some changes come again. While no cell has the topic, the query waits.
    [3]  The limit of a trigger holds for all cells together, but for at least one entry of each. A topic that has come
         to a cell is first read up to the position of the others there, however much that is.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from sow_spark.errors import HINTS, SowSourceError, option_error
from sow_spark.options import Connecting, Reading
from sow_spark.over_cells import NO_TOPIC, cells_of
from sow_spark.read_limits import ReadLimit, SupportsTriggerAvailableNow
from sow_spark.stream_instances import ELSEWHERE, LOSSES, PAUSE_SECONDS, InstanceInUse
from sow_spark.stream_offsets import Offset, apart, marked, topics_of, without
from sow_spark.stream_pins import tell_loss
from sow_spark.stream_reading import ChangesReader, check_kind

if TYPE_CHECKING:
    import pyarrow as pa

_Answer = TypeVar("_Answer")
_ALONE: Final = ""
"""The name of the cell of a server without a placement."""


def _if_any(call: Callable[[], _Answer]) -> _Answer | None:
    """The result of a call in a cell; None: no topic of the query is there."""
    try:
        return call()
    except SowSourceError as error:
        if error.reason != NO_TOPIC:
            raise
        return None


class CellsReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows several topics. Tasks have pickled copies, made before any call."""

    def __init__(self, reading: Reading, schema: StructType) -> None:
        """Raises SowSourceError for a schema that cannot be read."""
        self._reading = reading
        self._schema = schema
        self._alone = ChangesReader(reading, schema)
        self._home = InstanceInUse(reading.connecting, reading.named, None)
        self._cells: Mapping[str, Connecting] = {}
        self._readers: dict[str, tuple[Connecting, ChangesReader]] = {}
        self._only: frozenset[str] | None = None  # the cells with an end for AvailableNow
        self._initial: Offset | None = None
        self._last: Offset | None = None

    # ---- cells ----

    def _look(self) -> bool:
        """Looks for the cells; False: the server has none."""
        try:
            self._cells = self._home.anywhere(None, self._ask)
        except SowSourceError as error:
            if not self._cells or error.reason not in LOSSES:
                raise  # else those that are known go on, also while this one is away
        return _ALONE not in self._cells

    def _ask(self) -> dict[str, Connecting]:
        given = self._reading.connecting
        return self._home.call(
            "looking for the cells", lambda client: {name: to for name, (to, _) in cells_of(given, client).items()}
        )

    def _reader(self, cell: str) -> ChangesReader:
        to = self._cells[cell]
        before = self._readers.get(cell)
        if before is not None and before[0] == to:
            return before[1]
        if before is not None:
            before[1].stop()  # the cell has other addresses now
        reader = ChangesReader(replace(self._reading, cell=cell, connecting=to, starting_from="earliest"), self._schema)
        self._readers[cell] = to, reader
        return reader

    def _starts(self, offset: Offset) -> dict[str, Offset]:
        """The positions in an offset, by cell. That of a query that knew one cell is of the cell of the option
        `server`."""
        if "cells" in offset:
            return offset["cells"]
        check_kind(self._reading, offset)
        home = next(name for name, to in self._cells.items() if to == self._reading.connecting)
        return {home: offset}

    def _check_alone(self, offset: Offset | None) -> None:
        if offset is not None and "cells" in offset:
            raise SowSourceError(
                "OPTION_INVALID",
                f"this checkpoint is of the cells {', '.join(offset['cells'])}, and the server has no cells",
                "give a new checkpoint",
            )

    # ---- the offsets of a query ----

    # Spark's stubs say `dict`; the keys are those of the offsets.
    def initialOffset(self) -> Offset:  # type: ignore[override]  # noqa: N802  # Spark's name
        """The start of a new query, in each cell that has topics of it."""
        if self._initial is None:
            if self._look():
                self._initial = self._begin()
            elif isinstance(self._reading.starting_from, Mapping):
                raise option_error("startingFrom", "the server has no cells: give one bookmark")
            else:
                self._initial = self._alone.initialOffset()
        return self._initial

    def _begin(self) -> Offset:
        pin = f"spark-{secrets.token_hex(8)}"
        found: dict[str, Offset] = {}
        try:
            for cell in self._cells:
                where = self._where(cell, found)
                start = _if_any(partial(self._reader(cell).begin, where or "latest", pin))
                if start is not None:
                    found[cell] = start
                    if where is None:
                        raise option_error(
                            "startingFrom",
                            f"there are topics in the cells {', '.join(found)}, and a bookmark is of one: give that of "
                            f'each, as {{"{cell}": "…"}}',
                        )
            self._check_found()
        except SowSourceError:
            for cell, offset in found.items():
                self._reader(cell).withdraw(offset)
            raise
        if not found:
            raise SowSourceError(
                NO_TOPIC, f"no topic with a journal matches {self._reading.topic_pattern!r}", HINTS[NO_TOPIC]
            )
        return Offset(cells=found)

    def _where(self, cell: str, others: Mapping[str, Offset]) -> str | datetime | None:
        """The start in a cell, by `startingFrom`. None: that has no position there."""
        where = self._reading.starting_from
        if isinstance(where, Mapping):
            return where.get(cell)
        if others and isinstance(where, str) and where not in ("earliest", "latest"):
            return None
        return where

    def _check_found(self) -> None:
        """Raises SowSourceError for a listed topic that no cell has."""
        present = {name for _, reader in self._readers.values() for name in reader.present}
        for name in self._reading.topics:
            if name not in present:
                raise SowSourceError("TOPIC_NOT_FOUND", f"topic {name} is not there", HINTS["TOPIC_NOT_FOUND"])

    def latestOffset(self, start: Offset | None = None, limit: ReadLimit | None = None) -> Offset:  # type: ignore[override]  # noqa: N802  # Spark's name
        """The end of the next micro-batch, in each cell."""
        if not self._look():
            self._check_alone(start)
            self._last = self._alone.latestOffset(start, limit)
            return self._last
        if start is None:  # PySpark 4.1, as in ChangesReader
            start, limit = self._last or self.initialOffset(), self.getDefaultReadLimit()
        starts, limits = self._starts(start), self._alone.limits(limit)
        self._last = self._settled(lambda: self._next(starts, *limits))
        return self._last

    def _next(self, starts: Mapping[str, Offset], entries: int, size: int) -> Offset:
        ends: dict[str, Offset] = {}
        left: dict[str, tuple[str, str]] = {}
        for cell in starts.keys() - self._cells.keys():
            left |= {topic: (cell, marked(starts[cell], topic)) for topic in topics_of(starts[cell], "")}
        if self._only is not None:
            self._set_ends(starts.keys())
        cells = [cell for cell in self._cells if self._only is None or cell in self._only or cell in starts]
        for number, cell in enumerate(cells):
            reader, others = self._reader(cell), len(cells) - number
            if cell not in starts:
                pin = next((start["pin"] for start in starts.values() if "pin" in start), "")
                end = _if_any(partial(reader.begin, "earliest", pin or f"spark-{secrets.token_hex(8)}"))  # [1]
                if end is not None:
                    ends[cell] = end
                continue
            bounds = [max(1, bound // others) if bound else 0 for bound in (entries, size)]
            end = _if_any(partial(reader.next_end, starts[cell], *bounds))
            ends[cell] = without(starts[cell] if end is None else end, reader.left)
            left |= {topic: (cell, bookmark) for topic, bookmark in reader.left.items()}
            entries, size = [
                bound and max(1, bound - used) for bound, used in zip((entries, size), reader.planned, strict=True)
            ]
        present = [topic for cell in cells for topic in self._reader(cell).present]
        if twice := {topic for topic in present if present.count(topic) > 1}:  # it has just moved
            raise SowSourceError(ELSEWHERE, f"two cells have {', '.join(twice)}", HINTS[ELSEWHERE])
        for topic, (cell, bookmark) in left.items():
            to = self._cell_with(topic, cell, bookmark, cells)
            if to is not None:
                ends[to] = self._reader(to).come(ends[to], topic, bookmark)
        self._check_found()
        return Offset(cells=ends)

    # ---- topics that move [2] ----

    def _settled(self, plan: Callable[[], _Answer]) -> _Answer:
        """The result of a plan, which is made again while a topic is on its way to another cell."""
        give_up = time.monotonic() + self._reading.connecting.retry_for_micros / 1e6
        while True:
            try:
                return plan()
            except SowSourceError as error:
                if error.reason != ELSEWHERE or time.monotonic() >= give_up:
                    raise
            time.sleep(PAUSE_SECONDS)

    def _cell_with(self, topic: str, left: str, bookmark: str, looked_at: Iterable[str]) -> str | None:
        """The cell that has a topic now, of those that were looked at. None: it was deleted, and its loss is told.
        `left`: the cell that it was in, up to a bookmark."""
        for cell in looked_at:
            if topic in self._reader(cell).present:
                return cell
        if not self._is_somewhere(topic):
            tell_loss(self._reading, topic, f"{bookmark} of the cell {left}", "the topic was deleted")
            return None
        if self._only is not None:
            self._set_ends(self._cells.keys())
        raise SowSourceError(
            ELSEWHERE, f"topic {topic} has left the cell {left}, and no other has it", HINTS[ELSEWHERE]
        )

    def _is_somewhere(self, topic: str) -> bool:
        """True if a cell has a topic, with a journal, or is about to take it (rule C17)."""
        try:
            return self._home.call("looking for it", lambda client: client.describe_topic(topic)).settings.journal
        except SowSourceError as error:
            if error.reason not in ("TOPIC_NOT_FOUND", "PERMISSION_DENIED"):
                raise
            return False

    def _set_ends(self, cells: Iterable[str]) -> None:
        """AvailableNow ends at the present head of cells that had no topics before."""
        assert self._only is not None, "there is an end"
        late = set(cells) & (self._cells.keys() - self._only)
        self._only = self._only.union(cell for cell in late if _if_any(self._reader(cell).set_target))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """The limit of the options."""
        return self._alone.getDefaultReadLimit()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Sets the end of the query: the present head of each cell."""
        if not self._look():
            self._alone.prepareForTriggerAvailableNow()
            return
        self._only = frozenset([cell for cell in self._cells if _if_any(self._reader(cell).set_target)])

    def reportLatestOffset(self) -> Offset | None:  # type: ignore[override]  # noqa: N802  # Spark's name
        """The heads, for the query's progress, and how far the end of the last micro-batch is behind them."""
        if not self._readers:
            return self._alone.reportLatestOffset()
        told = {cell: reader.reportLatestOffset() for cell, (_, reader) in self._readers.items()}
        heads = {cell: offset for cell, offset in told.items() if offset is not None}
        if not heads:
            return None
        return Offset(
            cells=heads,
            recordsBehind=sum(offset["recordsBehind"] for offset in heads.values()),
            secondsBehind=max(offset["secondsBehind"] for offset in heads.values()),
        )

    # ---- the changes of a micro-batch ----

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # type: ignore[override]  # Spark says dict
        """The changes after `start` up to `end`, in parts."""
        divided = self._look()
        self._last = end
        if not divided:
            self._check_alone(end)
            return self._alone.partitions(start, end)
        return self._settled(lambda: self._parts(self._starts(start), self._starts(end)))

    def _parts(self, starts: Mapping[str, Offset], ends: Mapping[str, Offset]) -> list[InputPartition]:
        found: list[InputPartition] = []
        left: dict[str, tuple[str, str]] = {}
        for cell, end in ends.items():
            if cell not in starts:
                continue  # [1]
            if cell not in self._cells:
                left |= {topic: (cell, marked(starts[cell], topic)) for topic in topics_of(end, "").keys() - apart(end)}
                continue
            reader = self._reader(cell)
            found += _if_any(partial(reader.partitions, starts[cell], end)) or ()
            left |= {topic: (cell, bookmark) for topic, bookmark in reader.left.items()}
        if left:
            for cell in self._cells:
                _if_any(self._reader(cell).look)
        for topic, (cell, bookmark) in left.items():
            to = self._cell_with(topic, cell, bookmark, self._cells)
            if to is not None:
                found += self._reader(to).parts_from(topic, bookmark)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part."""
        return self._alone.read(partition)

    def commit(self, end: Offset) -> None:  # type: ignore[override]  # Spark says dict
        """Releases the journals up to `end`."""
        if "cells" not in end:
            self._alone.commit(end)
            return
        for cell, offset in end["cells"].items():
            if cell in self._readers:
                self._readers[cell][1].commit(offset)

    def stop(self) -> None:
        """Stops renewing the pins, which stay for `pinLease`."""
        for _, reader in self._readers.values():
            reader.stop()
        self._alone.stop()
        self._home.close()
