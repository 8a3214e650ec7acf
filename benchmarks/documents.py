"""The records that every benchmark publishes: JSON documents of exactly 160 bytes with an integer `id`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

DOCUMENT_BYTES: Final = 160
TTL_SECONDS: Final = 3600
KEY_PATHS: Final = '["/id"]'

_TEXT: Final = (
    b'{"id":%d,"symbol":"S%03d","side":"%s","price":%d.%02d,"quantity":%d,"account":"A-%05d","revision":%d,"text":"%s"}'
)
_PADDING: Final = b"abcdefghijklmnopqrstuvwxyz 0123456789 " * 4
_SIDES: Final = (b"buy", b"sell")


def document(number: int, revision: int = 0) -> bytes:
    """The document of key `number`; another `revision` has other content."""
    mixed = (number * 2_654_435_761 + revision * 40_503) & 0xFFFFFFFF
    bare = _TEXT % (
        number,
        mixed % 500,
        _SIDES[mixed & 1],
        mixed % 997,
        mixed % 100,
        mixed % 10_000,
        mixed % 99_991,
        revision,
        b"",
    )
    return bare[:-2] + _PADDING[: DOCUMENT_BYTES - len(bare)] + b'"}'


def documents(numbers: Iterable[int], revision: int = 0) -> list[bytes]:
    """The documents of many keys."""
    return [document(number, revision) for number in numbers]


def keys(numbers: Iterable[int]) -> list[str]:
    """The keys that a store derives from those documents, for peers that must be given them."""
    return list(map(str, numbers))
