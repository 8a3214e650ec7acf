"""FIX and nvfix: flat lists of `name=value` fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sow.flat_fields import DATA_OF, USUAL_TAGS, FlatFields
from sow_server.engine.formats.deltas import Difference, difference_fields
from sow_server.engine.formats.paths import PathTree, Steps
from sow_server.engine.formats.payloads import BadRecord, Columns, Decode, DeriveKeys, Projection, key_of, malformed
from sow_server.engine.values.errors import Reason

SOUGHT_MAX: Final = 5
"""Names that are searched for one by one: to split a payload at its separators costs as much as to search for five."""


class FieldFormat:
    """`name=value` fields with a one-byte separator: FIX (names are tags) and nvfix.

    Of a repeated name the first field counts. `sow.flat_fields` says where a field ends.
    """

    def __init__(self, separator: bytes, *, tags: bool) -> None:
        self._separator = separator
        self._tags = tags
        self._flat = FlatFields(separator, tags=tags)

    def _fields(self, payload: bytes) -> Sequence[Sequence[bytes]] | BadRecord:
        """Name and value of each field."""
        flat = self._flat
        fields: list[list[bytes]] = []
        for part in payload.split(self._separator):
            if part:
                field = part.split(b"=", 1)
                # Nearly all tags are usual ones, and to look for them costs less than to see whether they are numbers.
                if len(field) != 2 or (field[0] not in USUAL_TAGS if self._tags else not field[0]):
                    break
                fields.append(field)
        else:
            if fields:
                return fields
        fault = flat.fault(payload)
        return malformed(fault) if fault is not None else [part.split(b"=", 1) for part in flat.parts(payload) if part]

    def check(self, payload: bytes) -> BadRecord | None:
        fields = self._fields(payload)
        return fields if isinstance(fields, BadRecord) else None

    def derive_keys(self, paths: Sequence[Steps]) -> DeriveKeys:
        names = [self._flat.name(path[0].encode()) for path in paths]

        def derive_one(payload: bytes) -> bytes | BadRecord:
            fields = self._fields(payload)
            if isinstance(fields, BadRecord):
                return fields
            first: dict[bytes, bytes] = dict(reversed(fields))  # type: ignore[arg-type]  # pairs, as lists: they cost least
            try:
                values = [value.decode() if (value := first.get(name)) is not None else None for name in names]
            except UnicodeDecodeError:
                return BadRecord(Reason.KEY_NOT_UTF8, "key: a key field is not well-formed UTF-8")
            return key_of(values, paths)

        return lambda payloads: [derive_one(payload) for payload in payloads]

    def _names(self, names: frozenset[bytes]) -> frozenset[bytes]:
        """Names of a request as those of fields."""
        return frozenset(map(self._flat.name, names)) if self._tags else names

    def project(self, payload: bytes, projection: Projection) -> bytes:
        flat, separator = self._flat, self._separator
        included, excluded = projection.include_tree.names, projection.exclude_tree.names
        # A longer path leads into no field of this format: in a filter, too, it is null and hides nothing.
        hidden = projection.hidden_tree.ends
        if self._tags:
            included, excluded, hidden = self._names(included), self._names(excluded), self._names(hidden)

        def keeps(name: bytes) -> bool:
            return name not in hidden and (name in included if included else name not in excluded)

        if flat.is_plain(payload):
            parts = [part for part in payload.split(separator) if part and keeps(part.split(b"=", 1)[0])]
            return b"".join([part + separator for part in parts])
        # A data field keeps its length, without which nobody knows where it ends; where that is hidden, both are.
        kept: list[bytes] = []
        lone = b""  # the tag whose length field comes last, and is not its own
        for item in flat.items(payload):
            if item.raw and keeps(item.name) and item.length not in hidden:
                if lone and lone == item.name:
                    kept.pop()
                kept += (item.length_raw, item.raw) if item.length else (item.raw,)
                lone = DATA_OF.get(item.name, b"")
            elif item.length and keeps(item.length):
                kept.append(item.length_raw)
                lone = item.name
        return b"".join([part + separator for part in kept])

    def decode(self, payload: bytes) -> dict[str, object]:
        parts = [part.partition(b"=") for part in self._flat.parts(payload)]
        return {
            name.decode(errors="replace"): value.decode(errors="replace")
            for name, equals, value in reversed(parts)
            if equals and name
        }

    def decoder(self, names: Sequence[str]) -> Decode:
        if any("\ufffd" in name for name in names):
            return self.decode  # it may represent bytes that are not UTF-8
        wanted = {name.encode("utf-8", "surrogatepass"): name for name in names if name and "=" not in name}
        flat, separator, tags, count = self._flat, self._separator, self._tags, len(wanted)

        def found_in(parts: Sequence[bytes]) -> dict[str, object]:
            found: dict[str, object] = {}
            for part in parts:
                field, equals, value = part.partition(b"=")
                name = wanted.get(field)
                if name is not None and equals and name not in found:
                    found[name] = value.decode(errors="replace")
                    if len(found) == count:
                        break
            return found

        if len(wanted) > SOUGHT_MAX:
            return lambda payload: found_in(flat.parts(payload))
        sought = [(separator + field + b"=", name) for field, name in wanted.items() if separator not in field]

        def decode(payload: bytes) -> dict[str, object]:
            opened = separator + payload
            if tags and flat.is_odd(opened):
                return found_in(flat.parts(payload))
            found: dict[str, object] = {}
            for beginning, name in sought:
                at = opened.find(beginning)
                if at >= 0:
                    at += len(beginning)
                    end = opened.find(separator, at)
                    found[name] = opened[at : end if end >= 0 else None].decode(errors="replace")
            return found

        return decode

    def columns(self, names: Sequence[str]) -> Columns | None:
        return None

    def merge(self, base: bytes, delta: bytes, unset: PathTree) -> bytes | BadRecord:
        try:
            return self._flat.merged(base, delta, self._names(unset.names))
        except ValueError as error:
            return malformed(str(error))

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        return difference_fields(old, new, key_paths, self._flat)
