"""The one exception of the connector. Its first line says the reason, the event and the remedy.

Spark prints the last lines of a Python traceback inside a Java one, and cuts long texts. So the first line of the text
has everything important: `REASON: message; hint`. Guarantees:

    [1]  A `SowError` of the client never leaves the connector unchanged: `readable` makes a `SowSourceError` of it,
         which begins with the server's reason and has a hint where one helps.
    [2]  Every exception here survives pickling, because some cross process borders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from sow_client import SowError


class SowSourceError(Exception):
    """Every deliberate error of the data source. `reason` is the server's (docs/errors.md), or one of those below.

    OPTION_INVALID: an option is unknown, missing, wrong or without effect. SCHEMA_UNKNOWN: there are no records to
    infer a schema from. SCHEMA_UNSUPPORTED: a type cannot be read or written. ROW_MALFORMED: a payload or a row does
    not fit the schema. DATA_LOST: changes that a stream has still to read are gone. ROWS_DIFFER, INPUT_CUT,
    INPUT_UNKNOWN: a task cannot be recorded as finished (see docs/spark.md).
    """

    def __init__(self, reason: str, message: str, hint: str = "") -> None:
        super().__init__(f"{reason}: {message}" + (f"; {hint}" if hint else ""))
        self.reason = reason
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reason, self.message, self.hint)


def option_error(option: str, message: str) -> SowSourceError:
    """The error for an option that is unknown, missing or wrong; it names the option."""
    return SowSourceError("OPTION_INVALID", f"option {option}: {message}")


HINTS: Final[Mapping[str, str]] = {
    "UNREACHABLE": "check the option server, and that executors can reach it, too",
    "TOPIC_NOT_FOUND": "check the option topic; `sow topics` lists all topics",
    "PATTERN_MATCHES_NOTHING": "check the option topicPattern: it must match whole names of topics that have a journal",
    "TOPIC_ELSEWHERE": "give all servers the same placement (`sow cells list` shows them), and run it again",
    "FILTER_INVALID": "see docs/filters.md; the option filter is sent unchanged",
    "EXPORT_NOT_FOUND": "run the action again on a newly loaded DataFrame, or give a longer lease",
    "READER_LOST": "run the action again on a newly loaded DataFrame",
    "LOAD_NOT_FOUND": "run the write again, or give a longer lease",
    "NO_JOURNAL": "streams need the journal of the topic: set its retention",
    "BOOKMARK_MALFORMED": "give startingFrom a bookmark as it was received, a time, earliest or latest",
    "TIME_IN_FUTURE": "give startingFrom a time that is not in the future; compare the clocks",
    "UNIMPLEMENTED": "the server is older than this connector",
    "UNAUTHENTICATED": "check the option tokenFile, or tlsCertificate and tlsKey",
    "PERMISSION_DENIED": "`sow auth check` tells an operator which line of the access file decides",
    "ACCESS_CHANGED": "run it again; its credential may have expired",
}
"""The remedy for a reason, where the message does not make it plain."""


_OPTIONS: Final[Mapping[str, str]] = {
    "idle_ttl_micros": "pinLease",
    "lease_micros": "lease",
    "parts": "partitions",
    "start_time_micros": "startingFrom",
}
"""The option behind a field of a request. The server may refuse a value that the option allows, by its settings."""


def readable(error: SowError, doing: str) -> SowSourceError:
    """The error to show for a client's error. `doing` names the attempted action, such as "reading part 3 of
    orders"."""
    field = error.details.get("field", "")
    if error.reason == "INVALID_ARGUMENT" and field in _OPTIONS:
        return option_error(_OPTIONS[field], error.message.removeprefix(f"{field}: "))
    return SowSourceError(error.reason, f"{doing}: {error.message}", HINTS.get(error.reason, ""))


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turns a `SowError` raised inside the block into a `SowSourceError`, by `readable`."""
    try:
        yield
    except SowError as error:
        # The cause would only repeat it, above the line that people look for.
        raise readable(error, doing) from None
