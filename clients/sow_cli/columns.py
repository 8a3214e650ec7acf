"""Fields of payloads as columns, for every output that shows records in rows.

A program that shows rows takes `Columns.of(form, first payloads, chosen)` once, `headings` for its first line, and
`Columns.texts(payload)` for each row.

    [1]  Texts are exact: a number has the digits that were published, a string is its characters, an object or an array
         is its JSON on one line. None stands for a field that is null or not there.
    [2]  Columns that were not chosen are the top-level fields of the first records, in the order in which they come.
         Later records may have other fields. These are counted, so that a command can tell what it left out. A stream
         has columns that grow.
    [3]  The name of a column never stands for two things: metadata are `_key`, `_version` …, as in Spark, and a field
         of such a name, or of one that pandas gives an index, has its path as its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from sow_cli.cells import InQuotes, looks_like_a_value
from sow_client import PayloadForm

Path: TypeAlias = tuple[str, ...]
"""The names on the way to a field."""

METADATA: Final = ("key", "version", "publish_time", "expire_time", "origin", "sequence")
"""Metadata; `--select` and filters name them with `@` in front."""
_TIMES: Final = ("publish_time", "expire_time")
METADATA_COLUMNS: Final = {
    **{f"_{name}": name for name in METADATA},
    **{f"_{name}_micros": name for name in _TIMES},
    "_payload": "payload",
}
"""The columns that hold metadata, with times in either form, and whole payloads. In input they are no fields."""
INDEX: Final = re.compile(r"__index_level_\d+__")
"""The name of a column where pandas keeps an index that has no name: no field."""
_LEFT_OUT_MAX: Final = 20
GROWN_MAX: Final = 50
"""Columns of a stream."""

_STEP: Final = re.compile(r"/(?:\[((?:[^\]\\]|\\.)*)\]|([^/\[][^/]*))")
_PLAIN: Final = re.compile(r"[\w.:$#]+")
_ESCAPED: Final = re.compile(r"\\(.)")
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_QUOTE: Final = ord('"')
_NINE: Final = ord("9")  # a text that begins at or below it, and with no quote, is a number
_decode_text: Final = msgspec.json.Decoder(str).decode
_JSON: Final = PayloadForm()


class Columns:
    """The columns of the fields in one output. Owns the count of what they leave out ([2])."""

    __slots__ = ("_chosen", "_firsts", "_form", "_mixed", "_names", "_paths", "left_out", "records_left_out")

    def __init__(
        self, form: PayloadForm, paths: Iterable[Path], *, chosen: bool, mixed: frozenset[str] = frozenset()
    ) -> None:
        """`chosen`: the user has named them, so nothing counts as left out. `mixed`: fields that are a text in one
        record and another value in another one."""
        self._form = form
        self._mixed = mixed
        self._paths = tuple(paths)
        self._chosen = chosen
        self._firsts = [path[0] for path in self._paths]
        self._names = frozenset(self._firsts)
        self.left_out: list[str] = []
        """Names of fields without a column, as they came; at most `_LEFT_OUT_MAX`."""
        self.records_left_out = 0
        """Records with such fields."""

    @classmethod
    def of(cls, form: PayloadForm, payloads: Iterable[bytes], chosen: Sequence[str] = ()) -> Columns | None:
        """The columns of these paths, or of the first payloads; None: the payloads have no fields. Raises ValueError
        for a text that is no path."""
        if chosen:
            return cls(form, [steps(path) for path in chosen], chosen=True)
        names: dict[str, None] = {}
        for payload in payloads:
            names.update(dict.fromkeys(form.fields(payload) or ()))
        return cls(form, [(name,) for name in names], chosen=False) if names else None

    @property
    def headings(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple([heading(path) for path in self._paths])

    def texts(self, payload: bytes) -> list[str | None]:
        """The texts of a record, column by column ([1])."""
        return list(map(text, self._values(payload)))

    def cells(self, payload: bytes) -> list[str | None]:
        """The same as cells of a CSV: a text that could be taken for another value stands in quotation marks."""
        values = self._values(payload)
        if self._form.message_type not in ("json", "msgpack"):
            return list(map(text, values))  # all are texts
        if not self._mixed:
            return [_cell(value, False) for value in values]
        return [_cell(value, first in self._mixed) for value, first in zip(values, self._firsts, strict=True)]

    def _values(self, payload: bytes) -> list[object]:
        found = self._form.fields(payload) or {}
        if not self._chosen and not found.keys() <= self._names:
            self._leave_out(found)
        values: list[object] = list(map(found.get, self._firsts))
        for number, path in enumerate(self._paths) if self._chosen else ():
            if len(path) > 1:
                values[number] = below(values[number], path[1:])
        return values

    def _leave_out(self, found: Iterable[str]) -> None:
        self.records_left_out += 1
        for name in found:
            if len(self.left_out) < _LEFT_OUT_MAX and name not in self._names and heading((name,)) not in self.left_out:
                self.left_out.append(heading((name,)))


class GrowingColumns:
    """The columns of a stream of records: those that were chosen, else one for each field that has come, up to a bound.
    Owns their names."""

    def __init__(self, chosen: Sequence[str] = ()) -> None:
        """`chosen`: paths of fields. Raises ValueError for a text that is no path."""
        self._chosen = tuple(map(steps, chosen))
        self._names: dict[str, None] = {}
        self._left_out: dict[str, None] = {}

    @property
    def is_chosen(self) -> bool:
        """True: the user has named the columns."""
        return bool(self._chosen)

    @property
    def left_out(self) -> list[str]:
        """Names of fields beyond the bound, as they came; at most `_LEFT_OUT_MAX`."""
        return [heading((name,)) for name in self._left_out]

    def of(self, form: PayloadForm, payloads: Iterable[bytes]) -> Columns | None:
        """The columns, after these payloads have come; None: one of these has no fields, or none has come."""
        if self._chosen:
            return Columns(form, self._chosen, chosen=True)
        for payload in payloads:
            found = form.fields(payload)
            if found is None:
                return None
            if not found.keys() <= self._names.keys():
                self._grow(found)
        return Columns(form, [(name,) for name in self._names], chosen=True) if self._names else None

    def _grow(self, found: Iterable[str]) -> None:
        for name in found:
            if name in self._names or len(self._names) < GROWN_MAX:
                self._names[name] = None
            elif len(self._left_out) < _LEFT_OUT_MAX:
                self._left_out[name] = None


def below(value: object, path: Path) -> object:
    """The value at the end of a path that begins in a field's value; None: there is none."""
    for name in path:
        found: object = _JSON.fields(bytes(value)) if isinstance(value, msgspec.Raw) else value
        value = found.get(name) if isinstance(found, Mapping) else None
    return value


def text(value: object) -> str | None:
    """The text of a field's value ([1])."""
    if type(value) is msgspec.Raw:  # the usual way is short: this is done for each cell
        data = bytes(value)
        first = data[0]
        if first == _QUOTE:
            return _decode_text(data)
        if first <= _NINE:
            return data.decode()
        return None if data == b"null" else one_line(data).decode("utf-8", "backslashreplace")
    return PayloadForm.text(value)


def is_text(value: object) -> bool:
    """True if the cell of a value shows a text: also that of bytes, and of a time of MessagePack."""
    if isinstance(value, msgspec.Raw):
        return bytes(value)[0] == _QUOTE
    return isinstance(value, str) or isinstance(PayloadForm.plain(value), str)


def _cell(value: object, always: bool) -> str | None:
    if type(value) is msgspec.Raw:  # the usual way is short, as in `text`
        data = bytes(value)
        if data[0] != _QUOTE:
            return text(value)
        shown: str | None = _decode_text(data)
    else:
        shown = text(value)
        if not shown or not is_text(value):
            return shown
    return InQuotes.of(shown) if shown and (always or looks_like_a_value(shown)) else shown


def is_number(shown: str) -> bool:
    """True for the text of a number."""
    return _NUMBER.fullmatch(shown) is not None


def one_line(document: bytes) -> bytes:
    """Removes the line ends of a document that was published over several lines; its values stay. They would break
    NDJSON."""
    if b"\n" in document or b"\r" in document:
        return msgspec.json.format(document, indent=-1)
    return document


# ---- names ----


def steps(path: str) -> Path:
    r"""The names of a path such as `/a/b`; `/[odd name]` holds slashes, and `\]` and `\\`. Raises ValueError."""
    found = []
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None:
            raise ValueError(f"{path!r} is not a path such as /price or /price/bid, at {at}")
        found.append(match[2] if match[1] is None else _ESCAPED.sub(r"\1", match[1]))
        at = match.end()
    if not found:
        raise ValueError("a path is empty")
    return tuple(found)


def heading(path: Path) -> str:
    """The name of a field's column ([3])."""
    first = path[0]
    is_other = not first or first[0] in "/@" or first in METADATA_COLUMNS or INDEX.fullmatch(first) is not None
    if len(path) == 1 and not is_other:
        return first
    return "".join([step(name) for name in path])


def path_of(column: str) -> Path:
    """The field that a column of this name holds: the inverse of `heading`. Raises ValueError."""
    return steps(column) if column.startswith("/") else (column,)


def metadata_heading(name: str) -> str:
    """The name of a column of metadata in CSV, where times are microseconds."""
    return f"_{name}_micros" if name in _TIMES else f"_{name}"


def step(name: str, *, in_filter: bool = False) -> str:
    """A step of a path: the inverse of `steps`. `in_filter`: filters take fewer names without brackets, as `/a-1` is a
    subtraction there."""
    if _PLAIN.fullmatch(name) or (not in_filter and name and "/" not in name and not name.startswith("[")):
        return f"/{name}"
    return "/[" + name.replace("\\", "\\\\").replace("]", "\\]") + "]"
