"""Whether a task has been given all of its rows.

Spark hands a Python writer its rows as an Arrow stream over a socket. When what is upstream fails (a function of the
user, a lost shuffle block, a kill), it closes its end of the socket, and an Arrow stream that ends so looks to its
reader like one that is whole: the iterator just ends, early. Spark fails the task, but nothing tells the writer, which
would then record a part of its rows as all of them.

What can be told apart is the socket: after a whole stream Spark sends a mark that its worker program reads later, after
a cut one there is nothing. So we look at what comes next, without taking it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final, Protocol, cast

from pyspark.serializers import SpecialLengths

from sow_spark.errors import SowSourceError

_MARK: Final = SpecialLengths.END_OF_STREAM.to_bytes(4, "big", signed=True)
_INPUTS: Final = ("infile", "sock_file")
"""What the worker programs of PySpark call the stream from the JVM, in the frame at the bottom of each task."""


class _Peekable(Protocol):
    def peek(self, size: int, /) -> bytes: ...


def require_whole_input() -> None:
    """Returns when the iterator that a task was given has ended because there are no more rows.

    To be called in the task's thread, after the iterator has ended. Raises SowSourceError INPUT_CUT when the rows ended
    early, and INPUT_UNKNOWN when this version of PySpark does not let us see.
    """
    stream = _stream_from_spark()
    if stream is None:
        raise SowSourceError(
            "INPUT_UNKNOWN",
            "this version of PySpark does not show whether a task has seen all of its rows",
            "nothing is recorded as finished that may not be",
        )
    # Blocks until Spark has sent the mark, which it does right behind the rows, or has closed its end. A part of it may
    # be all that is there yet; peek does not wait for the rest.
    seen = stream.peek(len(_MARK))[: len(_MARK)]
    if not seen or not _MARK.startswith(seen):
        raise SowSourceError(
            "INPUT_CUT",
            "the rows of this task ended early",
            "what failed is upstream of the writer, see the other errors",
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
