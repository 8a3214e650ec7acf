"""The plan of a `sow bench`: its works, their size, and the documents that they publish. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sow_client import DurabilityName

INDEXES_MAX: Final = 4

SAME_VALUE: Final = 10
"""So many records have the same value in an indexed field."""
SEED: Final = 7
_INDEXED: Final = "abcd"
_MULTIPLIERS: Final = (2_654_435_761, 40_503_001, 97_654_321, 1_000_000_007)
_ENDING: Final = b'"}'

Work = Literal["publish", "update", "single", "get", "query", "index", "deliver", "expire"]
WORKS: Final[Mapping[Work, str]] = {
    "publish": "record",
    "update": "record",
    "single": "call",
    "get": "call",
    "query": "record",
    "index": "call",
    "deliver": "delivery",
    "expire": "record",
}
"""Each work, and its operation."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of the work."""

    topic: str
    """The name of the topics, before their numbers."""
    records: int = 100_000
    payload_bytes: int = 160
    indexes: int = 0
    subscribers: int = 0
    follow_all: bool = False
    """True: each subscriber gets every change of its topic. False: each has a filter, and one change in `subscribers`
    matches it."""
    topics: int = 1
    durability: DurabilityName | None = None
    """None: the server's default."""
    ttl: str = "1d"
    seconds: float = 5.0
    """The duration of each work except `publish`, which ends with the last record."""

    @property
    def names(self) -> list[str]:
        """The topics."""
        return [f"{self.topic}-{number}" for number in range(1, self.topics + 1)]

    @property
    def index_paths(self) -> list[str]:
        """The indexed fields."""
        return [f"/{name}" for name in _INDEXED[: self.indexes]]

    @property
    def values(self) -> int:
        """The number of different values in an indexed field."""
        return max(1, self.records // SAME_VALUE)

    @property
    def payload_bytes_min(self) -> int:
        """The length of the longest document without a text."""
        digits = len(str(self.records * 2)) + sum(len(str(self.values)) for _ in range(self.indexes))
        return len(_form(self.indexes)) - 2 * (1 + self.indexes) + digits + len(_ENDING)

    def applies(self, work: Work) -> bool:
        """False: this work needs indexes, or subscribers, and there are none."""
        return {"index": self.indexes, "deliver": self.subscribers}.get(work, 1) > 0


class Documents:
    """JSON documents of one length, whose text does not compress."""

    def __init__(self, plan: Plan) -> None:
        self._bytes = plan.payload_bytes
        self._form = _form(plan.indexes)
        self._factors = _MULTIPLIERS[: plan.indexes]
        self._values = plan.values
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
        self._text = "".join(random.Random(SEED).choices(letters, k=max(65_536, 2 * plan.payload_bytes))).encode()

    def make(self, numbers: Sequence[int], revision: int = 0, *, more: bytes = b"") -> list[bytes]:
        """The documents of these keys. Another `revision` has other values; `more`: further fields, as JSON."""
        form, factors, values, text, length = self._form, self._factors, self._values, self._text, self._bytes
        if more:
            form = form.replace(b',"t"', more.replace(b"%", b"%%") + b',"t"')
        places = len(text) - length
        made = []
        for number in numbers:
            head = form % (number, *[(number * factor + revision) % values for factor in factors])
            at = (number * 7_919 + revision * 104_729) % places
            made.append(head + text[at : at + length - len(head) - 2] + _ENDING)
        return made

    def value(self, number: int) -> int:
        """The value of record `number` in the first indexed field, before updates."""
        return number * self._factors[0] % self._values


def _form(indexes: int) -> bytes:
    return b'{"id":%d' + b"".join(b',"%c":%%d' % name.encode() for name in _INDEXED[:indexes]) + b',"t":"'
