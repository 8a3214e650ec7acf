"""FIX and nvfix: flat lists of `name=value` fields."""

from __future__ import annotations

from collections.abc import Sequence

from sow_server.engine.formats.deltas import Difference, difference_fields, merge_fields
from sow_server.engine.formats.paths import PathTree, Steps
from sow_server.engine.formats.payloads import BadRecord, Decode, DeriveKeys, Projection, key_of, malformed
from sow_server.engine.values.errors import Reason


class FieldFormat:
    """`name=value` fields with a one-byte separator: FIX (names are tags) and nvfix.

    Of a repeated name the first field counts.
    """

    def __init__(self, separator: bytes, *, tags: bool) -> None:
        self._separator = separator
        self._tags = tags

    def _fields(self, payload: bytes) -> list[list[bytes]] | BadRecord:
        fields: list[list[bytes]] = []
        position = 0
        for part in payload.split(self._separator):
            if part:
                field = part.split(b"=", 1)
                if len(field) != 2 or not field[0]:
                    return malformed(f"field {part[:40]!r} at byte {position} is not name=value")
                if self._tags and not field[0].isdigit():
                    return malformed(f"tag {field[0][:40]!r} at byte {position} is not a number")
                fields.append(field)
            position += len(part) + 1
        return fields or malformed("has no fields")

    def check(self, payload: bytes) -> BadRecord | None:
        fields = self._fields(payload)
        return fields if isinstance(fields, BadRecord) else None

    def derive_keys(self, paths: Sequence[Steps]) -> DeriveKeys:
        names = [path[0].encode() for path in paths]

        def derive_one(payload: bytes) -> bytes | BadRecord:
            fields = self._fields(payload)
            if isinstance(fields, BadRecord):
                return fields
            first = dict(reversed(fields))
            try:
                values = [value.decode() if (value := first.get(name)) is not None else None for name in names]
            except UnicodeDecodeError:
                return BadRecord(Reason.KEY_NOT_UTF8, "key: a key field is not well-formed UTF-8")
            return key_of(values, paths)

        return lambda payloads: [derive_one(payload) for payload in payloads]

    def project(self, payload: bytes, projection: Projection) -> bytes:
        included, excluded = projection.include_tree.names, projection.exclude_tree.names
        # A longer path leads into no field of this format: in a filter, too, it is null and hides nothing.
        hidden = projection.hidden_tree.ends

        def keeps(part: bytes) -> bool:
            name = part.split(b"=", 1)[0]
            return name not in hidden and (name in included if included else name not in excluded)

        parts = [part for part in payload.split(self._separator) if part and keeps(part)]
        return b"".join([part + self._separator for part in parts])

    def decode(self, payload: bytes) -> dict[str, object]:
        fields = self._fields(payload)
        if isinstance(fields, BadRecord):
            return {}
        return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in reversed(fields)}

    def decoder(self, names: Sequence[str]) -> Decode:
        if any("\ufffd" in name for name in names):
            return self.decode  # it may represent bytes that are not UTF-8
        wanted = {name.encode("utf-8", "surrogatepass"): name for name in names if name}
        separator = self._separator

        def decode(payload: bytes) -> dict[str, object]:
            found: dict[str, object] = {}
            for part in payload.split(separator):
                field, _, value = part.partition(b"=")
                name = wanted.get(field)
                if name is not None and name not in found:
                    found[name] = value.decode(errors="replace")
            return found

        return decode

    def merge(self, base: bytes, delta: bytes, unset: PathTree) -> bytes | BadRecord:
        return merge_fields(base, delta, unset, self._separator)

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        return difference_fields(old, new, key_paths, self._separator)
