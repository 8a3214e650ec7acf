"""Checks that a task has received all of its rows.

Spark gives a Python writer its rows as an Arrow stream over a socket. If something upstream fails (a function of the
user, a lost shuffle block, a kill), Spark closes its end of the socket. The reader cannot distinguish an Arrow stream
that ends this way from a whole one: the iterator just ends, early. Spark fails the task, but does not tell the writer,
which would then record a part of its rows as all of them.

The socket shows the difference. After a whole stream Spark sends a mark, which its worker program reads later. After a
cut stream nothing follows. So we peek at the next bytes without taking them.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final, Protocol, cast

from pyspark.serializers import SpecialLengths

from sow_spark.errors import SowSourceError

_MARK: Final = SpecialLengths.END_OF_STREAM.to_bytes(4, "big", signed=True)
_INPUTS: Final = ("infile", "sock_file")
"""Names of the stream from the JVM in PySpark's worker programs, in the frame at the bottom of each task."""


class _Peekable(Protocol):
    def peek(self, size: int, /) -> bytes: ...


def require_whole_input() -> None:
    """Returns if the task's iterator has ended because there are no more rows.

    Call it in the task's thread, after the iterator has ended. Raises SowSourceError: INPUT_CUT if the rows ended
    early, INPUT_UNKNOWN if this version of PySpark does not show it.
    """
    stream = _stream_from_spark()
    if stream is None:
        raise SowSourceError(
            "INPUT_UNKNOWN",
            "this version of PySpark does not show whether a task has seen all of its rows",
            "the task is not recorded as finished",
        )
    # Blocks until Spark has sent the mark, right after the rows, or has closed its end. Possibly only a part of the
    # mark has arrived yet; peek does not wait for the rest.
    seen = stream.peek(len(_MARK))[: len(_MARK)]
    if not seen or not _MARK.startswith(seen):
        raise SowSourceError(
            "INPUT_CUT",
            "the rows of this task ended early",
            "the failure is upstream of the writer, see the other errors",
        )


def _stream_from_spark() -> _Peekable | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("pyspark.") or frame.f_globals.get("__name__") == "__main__":
            for name in _INPUTS:
                stream = frame.f_locals.get(name)
                if hasattr(stream, "peek"):
                    return cast(_Peekable, stream)
        frame = frame.f_back
    return None
