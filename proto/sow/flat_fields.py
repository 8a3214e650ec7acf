"""The fields of fix and nvfix payloads, as the server and all Python programs around it read them. Pure.

    [1]  A payload is `name=value` fields with a separator of one byte. Empty fields are skipped. A value begins after
         the first `=`.
    [2]  In fix, a data field holds any bytes, also the separator, if the field right before it is its length and the
         length is true: decimal digits, and right behind so many bytes comes a separator or the end. Any other length
         is read as a plain field, and so is the field behind it. `fault` tells of it, so none is published.
    [3]  In fix, a tag is a number: 055 is 55.

The length fields are those of type LENGTH with a field of type DATA or XMLDATA, in FIX 4.0 to 5.0SP2. The source is the
data dictionaries of QuickFIX 1.15.1 (`spec/FIX40.xml` to `spec/FIX50SP2.xml`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

DATA_OF: Final[Mapping[bytes, bytes]] = {
    str(length).encode(): str(data).encode()
    for length, data in (
        (90, 91), (93, 89), (95, 96), (212, 213), (348, 349), (350, 351), (352, 353), (354, 355), (356, 357),
        (358, 359), (360, 361), (362, 363), (364, 365), (445, 446), (618, 619), (621, 622), (1184, 1185), (1277, 1278),
        (1280, 1281), (1282, 1283), (1397, 1398), (1401, 1402), (1403, 1404), (1468, 1469),
    )
}  # fmt: skip
"""The tag of a data field, by the tag of its length."""
USUAL_TAGS: Final = frozenset([b"%d" % tag for tag in range(1, 2000)]) - DATA_OF.keys()
"""Tags as they are usually spelled, of no length: a payload of these alone is split at its separators."""
_LENGTH_DIGITS_MAX: Final = 9
"""No payload is longer."""


def _one_of(words: Iterable[bytes]) -> bytes:
    """A pattern for one of these words. It branches at each byte, as `re` tries the ways of a branch one by one."""
    rests: dict[bytes, list[bytes]] = {}
    for word in sorted(words):
        rests.setdefault(word[:1], []).append(word[1:])
    ways = [first and re.escape(first) + _one_of(rest) for first, rest in rests.items()]
    return ways[0] if len(ways) == 1 else b"(?:%s)" % b"|".join(ways)


class Item(NamedTuple):
    """A field; a data field together with its length ([2])."""

    name: bytes
    """Empty: nothing stands between two separators."""
    value: bytes
    raw: bytes
    """The field as published."""
    length: bytes = b""
    """The tag of the length that belongs to it; empty: none does."""
    length_raw: bytes = b""
    """The length field as published."""


class FlatFields:
    """Reads the fields of payloads with one separator. Payloads without data fields and without zeros in front of tags
    take the short way: `split`."""

    __slots__ = ("is_odd", "separator", "tags")

    def __init__(self, separator: bytes, *, tags: bool) -> None:
        """`tags`: they are fix."""
        self.separator = separator
        self.tags = tags
        # The separator comes first, so the search looks for one byte, and for more only where that stands.
        self.is_odd: Final = re.compile(re.escape(separator) + b"(?:0|%s=)" % _one_of(DATA_OF)).search
        """True if a fix payload, given with a separator in front of it, is not plain."""

    def is_plain(self, payload: bytes) -> bool:
        """True: the fields of the payload are what stands between separators, and their names are as they stand
        there."""
        return not self.tags or self.is_odd(self.separator + payload) is None

    def name(self, name: bytes) -> bytes:
        """A name as `items` has it ([3])."""
        return (name.lstrip(b"0") or name[:1]) if self.tags else name

    def parts(self, payload: bytes) -> list[bytes]:
        """The fields, `name=value`, with names as `items` has them; empty ones may be among them. A length is a field
        of its own."""
        if self.is_plain(payload):
            return payload.split(self.separator)
        parts = []
        for item in self.items(payload):
            if item.length:
                parts.append(self.name(item.length_raw.partition(b"=")[0]) + b"=" + item.length_raw.partition(b"=")[2])
            parts.append(item.name + b"=" + item.value if b"=" in item.raw else item.raw)
        return parts

    def items(self, payload: bytes) -> list[Item]:
        """The fields in their order, also the empty ones."""
        items: list[Item] = []
        if self.is_plain(payload):
            for part in payload.split(self.separator):
                name, equals, value = part.partition(b"=")
                items.append(Item(name if equals else b"", value, part))
            if payload.endswith(self.separator) or not payload:
                items.pop()
            return items
        for start, end, name, place in self._fields(payload):
            raw = payload[start:end]
            item = Item(name, raw[place - start + 1 :] if place >= 0 else b"", raw)
            if items and DATA_OF.get(items[-1].name) == name and self.tags and self._is_length(items[-1].value, item):
                length = items.pop()
                item = item._replace(length=length.name, length_raw=length.raw)
            items.append(item)
        return items

    @staticmethod
    def _is_length(length: bytes, item: Item) -> bool:
        return length.isdigit() and len(length) <= _LENGTH_DIGITS_MAX and int(length) == len(item.value)

    def _fields(self, payload: bytes) -> Iterator[tuple[int, int, bytes, int]]:
        """Start, end, name and the place of the `=` of each field; that place is -1 where there is none."""
        separator, at = self.separator, 0
        data, size = b"", -1  # the tag that is due, and its bytes
        while at < len(payload):
            end = payload.find(separator, at)
            end = len(payload) if end < 0 else end
            equals = payload.find(b"=", at, end)
            name = self.name(payload[at:equals]) if equals >= 0 else b""
            if name and name == data and size >= 0:
                close = equals + 1 + size
                if close == len(payload) or payload[close : close + 1] == separator:
                    end = close
            yield at, end, name, equals
            value = payload[equals + 1 : end] if name in DATA_OF and self.tags else b""
            is_length = value.isdigit() and len(value) <= _LENGTH_DIGITS_MAX
            data, size = (DATA_OF[name], int(value)) if is_length else (b"", -1)
            at = end + 1

    def joined(self, items: Iterable[Item]) -> bytes:
        """The payload of these fields, with a separator between two."""
        parts: list[bytes] = []
        for item in items:
            parts += (item.length_raw, item.raw) if item.length else (item.raw,)
        return self.separator.join(parts)

    def merged(self, base: bytes, delta: bytes, unset: Container[bytes]) -> bytes:
        """`base` without the fields that are unset, each field of `delta` in the place of the base's first field of
        that name, or at the end. If `delta` repeats a name, the first counts; other fields of `base` stay unchanged. A
        data field and its length are one field. Raises ValueError if a field would be read as another one."""
        items = self.items(base)
        closed = len(self.joined(items)) < len(base)  # a separator at the end stays there
        merged = [_without_length(item, unset) for item in items if item.name not in unset]
        given = first_fields(self.items(delta))
        for index, item in enumerate(merged):
            if item.name and (replacement := given.pop(item.name, None)) is not None:
                merged[index] = replacement
        merged += given.values()
        if merged == items:
            return base
        joined = self.joined(merged)
        if not (self.is_plain(base) and self.is_plain(joined)) and self.items(joined) != merged:
            raise ValueError("in the merged record a length would not stand right before its data field")
        return joined + self.separator if closed else joined

    def fault(self, payload: bytes) -> str | None:
        """The reason why a payload is not to be published, with the position; None: it is a payload."""
        lengths = DATA_OF if self.tags else {}
        length, value, after = b"", b"", 0
        for start, end, name, equals in self._fields(payload):
            if start == end and not length:
                continue
            raw = payload[start:end]
            if length and name != DATA_OF[length]:
                break
            if not name:
                return f"field {raw[:40]!r} at byte {start} is not name=value"
            if self.tags and not name.isdigit():
                return f"tag {name[:40]!r} at byte {start} is not a number"
            if length:
                told, tags = value.decode("ascii", "backslashreplace")[:40], (length.decode(), name.decode())
                if not value.isdigit() or len(value) > _LENGTH_DIGITS_MAX:
                    return (
                        f"tag {tags[0]} at byte {after} is the length of tag {tags[1]}, and {told!r} is no number of "
                        "bytes"
                    )
                if int(value) != end - equals - 1:
                    return (
                        f"tag {tags[1]} at byte {start} has {int(value)} bytes by its length, tag {tags[0]}, and no "
                        f"separator or end is right behind these"
                    )
            length, value, after = (name, raw[equals - start + 1 :], start) if name in lengths else (b"", b"", 0)
        if length:
            return (
                f"tag {length.decode()} at byte {after} is the length of tag {DATA_OF[length].decode()}, which does "
                "not follow it"
            )
        return None if payload.strip(self.separator) else "has no fields"


def first_fields(items: Iterable[Item]) -> dict[bytes, Item]:
    """The first field of each name, in their order."""
    fields: dict[bytes, Item] = {}
    for item in items:
        if item.name:
            fields.setdefault(item.name, item)
    return fields


def _without_length(item: Item, unset: Container[bytes]) -> Item:
    return item._replace(length=b"", length_raw=b"") if item.length and item.length in unset else item
