"""What a Spark job shows when something is wrong: one exception whose first line says what, why, and what to do.

Spark prints the last lines of a Python traceback inside a Java one, and cuts long ones. So everything that matters is
in the first line of the text: `REASON: what happened; hint`. Guarantees:

E1  A `SowError` of the client never leaves the connector as it is: `readable` makes a `SowSourceError` of it, with the
    server's reason in front and a hint where there is one to give.
E2  Every exception here survives pickling: some cross process borders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from sow_client import SowError


class SowSourceError(Exception):
    """What the data source raises on purpose. `reason` is the server's (docs/errors.md), or one of the few below.

    OPTION_INVALID: an option is unknown, missing or wrong. SCHEMA_UNKNOWN: nothing to infer a schema from.
    SCHEMA_UNSUPPORTED: a type that cannot be read or written. ROW_MALFORMED: a payload or a row does not fit the
    schema. DATA_LOST: changes that a stream was to read are gone.
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
    "TOPIC_NOT_FOUND": "check the option topic; `sow topics` lists what there is",
    "FILTER_INVALID": "see docs/filters.md; the option filter is sent as it is",
    "EXPORT_NOT_FOUND": "run the action again on a newly loaded DataFrame, or give a longer lease",
    "LOAD_NOT_FOUND": "run the write again, or give a longer lease",
    "NO_JOURNAL": "streams need the journal of the topic: set its retention",
    "BOOKMARK_MALFORMED": "give startingFrom a bookmark as it was received, a time, earliest or latest",
    "TIME_IN_FUTURE": "give startingFrom a time that has come; compare the clocks",
    "UNIMPLEMENTED": "the server is older than this connector",
    "PERMISSION_DENIED": "check the tls options",
}
"""What to do about a reason, where that is not plain from the message."""


def readable(error: SowError, doing: str) -> SowSourceError:
    """The error to show for a client's error; `doing` says what was tried, such as "reading part 3 of orders"."""
    return SowSourceError(error.reason, f"{doing}: {error.message}", HINTS.get(error.reason, ""))


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turns a `SowError` from inside into what `readable` makes of it."""
    try:
        yield
    except SowError as error:
        # The cause would only repeat it, above the line that people look for.
        raise readable(error, doing) from None
