"""The table of docs/failover.md: what happens to each call at each kind of loss, made from the code that decides it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sow_client._failover import CALLS, Elsewhere, Step, next_step

LOSSES: Final = (
    ("the instance cannot be reached", "UNREACHABLE", False),
    ("is lost during the call", "UNREACHABLE", True),
    ("stops in order", "STOPPING", True),
    ("has stopped writing", "STORE_FAILED", True),
)
"""Kinds of losses: the heading, the reason of the error, and whether the instance may have got the call."""
_WORDS: Final = {Step.ELSEWHERE: "elsewhere", Step.SAME: "here", Step.RAISE: "error"}
_STREAMED: Final = ("SowDelete", "Restamp", "CheckTopic", "VerifyReplication", "RepairReplication")
"""Writes that are answered by a stream. They are not repeated by `next_step`: they may have done a part."""
_BEGUN: Final = "elsewhere; error once its first batch has come"
_BY_HAND: Final = {
    "Query": (("", ("elsewhere", _BEGUN, _BEGUN, "elsewhere")),),
    "Subscribe": (
        ("", ("resumes", "resumes", "resumes", "resumes")),
        (", consumer of a replicated durable", ("resumes", "resumes", "resumes", "resumes")),
        (", consumer of another durable", ("keeps", "keeps", "keeps", "keeps")),
    ),
    "PublishStream": (
        ("", ("elsewhere", "elsewhere", "elsewhere", "elsewhere")),
        (', with `failover_publish="unsent"`', ("elsewhere", "here", "elsewhere", "error")),
        (", with a unit, or an epoch without token", ("keeps", "keeps", "keeps", "keeps")),
    ),
}
"""Streams repeat themselves (`_subscription_core`, `_publish_core`, `_queries`)."""


def table() -> list[tuple[str, ...]]:
    """The rows, cell by cell. Calls without a remark that share their cells share a row."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in _rows():
        key = tuple(cells) if name.endswith("`") and name.count("`") == 2 and "," not in name else (name, *cells)
        grouped.setdefault(key, []).append(name)
    return [(", ".join(names), *key[-len(LOSSES) :]) for key, names in grouped.items()]


def _rows() -> Iterator[tuple[str, ...]]:
    """The rows of single calls."""
    for path, row in CALLS.items():
        shown = path.removeprefix("/sow.v1.").replace("/", ".")
        name = shown.partition(".")[2]
        if row.elsewhere is Elsewhere.NEVER:
            yield f"`{shown}`", *["keeps"] * len(LOSSES)
        elif name in _BY_HAND:
            for kind, cells in _BY_HAND[name]:
                yield f"`{shown}`{kind}", *cells
        elif name in _STREAMED:
            yield f"`{shown}`", "elsewhere", "error", "error", "error"
        else:
            yield f"`{shown}`", *_steps(path)
            if name == "Get":
                yield f"`{shown}`, with `touch`", *_steps(path, renews=True)
            if name == "Publish":
                yield f'`{shown}`, with a condition, or `failover_publish="unsent"`', *_steps(path, goes=False)


def _steps(path: str, *, goes: bool = True, renews: bool = False) -> list[str]:
    reads = CALLS[path].elsewhere is Elsewhere.AGAIN
    return [
        _WORDS[next_step(path, reason, again=reads, moves=1, kept=False, goes=goes, sent=sent, renews=renews)]
        for _, reason, sent in LOSSES
    ]
