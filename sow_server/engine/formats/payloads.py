"""Payloads by message type (rule K2): the operations of a `Format`, and the values that they take and return. Pure.

A payload is stored exactly as published. New payloads are made by `project` for a query, `merge` for a delta publish,
and `difference` for a delta subscription.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, Protocol

from sow_server.engine.formats.deltas import Difference
from sow_server.engine.formats.levels import DECODED_LEVELS
from sow_server.engine.formats.paths import PathTree, Steps, path_tree
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.keys import KeyFieldError, canonical_text, escape, path_text


class BadRecord(NamedTuple):
    """The reason why a record has no key, or is no document of its message type."""

    reason: Reason
    message: str


SELECTING: Final = 60
"""Nanoseconds for a byte of a document whose names are as short as can be."""
SELECTING_DEEP: Final = 450
"""The same where parts of the document are indexed, and brackets are all that it has."""
HIDING: Final = 1500
"""Nanoseconds for an element of an array."""

KeyColumn = list["bytes | BadRecord"]
Decode = Callable[[bytes], dict[str, object]]
Columns = Callable[[Sequence[bytes]], list[Sequence[object]]]
"""From payloads to the values of fields, a column for each."""
DeriveKeys = Callable[[Sequence[bytes]], KeyColumn]


@dataclass(frozen=True)
class Projection:
    """The fields of a payload that a query returns: only `include`, or all except `exclude` (rule Q2); and of these
    none of `hidden`, in no element of an array either (rule A5). Make one for a request or subscription, not for each
    record: its paths are compiled once, at their first use."""

    include: tuple[Steps, ...] = ()
    exclude: tuple[Steps, ...] = ()
    hidden: tuple[Steps, ...] = ()

    @cached_property
    def include_tree(self) -> PathTree:
        return path_tree(self.include)

    @cached_property
    def exclude_tree(self) -> PathTree:
        return path_tree(self.exclude)

    @cached_property
    def hidden_tree(self) -> PathTree:
        return path_tree(self.hidden)

    @cached_property
    def byte_nanos(self) -> int:
        """Nanoseconds for each byte of a payload, at most. However many paths there are: they are looked up by name."""
        trees = (self.include_tree, self.exclude_tree, self.hidden_tree)
        return SELECTING if all(tree.height <= DECODED_LEVELS for tree in trees) else SELECTING_DEEP

    @property
    def element_nanos(self) -> int:
        """Nanoseconds for each element of its arrays, at most: hidden fields are looked for in each."""
        return HIDING if self.hidden else 0

    def cost(self, size: int, elements: int | None = None) -> int:
        """An upper estimate, in nanoseconds, of the projection of a payload of so many bytes, for a choice of thread.
        `elements`: those of its arrays; None: one for every four bytes."""
        return self.byte_nanos * size + self.element_nanos * (size // 4 if elements is None else elements)


class Format(Protocol):
    """The operations of a message type."""

    def check(self, payload: bytes) -> BadRecord | None:
        """The reason why `payload` is no document of this type; None if it is one."""

    def derive_keys(self, paths: Sequence[Steps]) -> DeriveKeys:
        """A function from payloads to the keys that `paths` give them."""

    def project(self, payload: bytes, projection: Projection) -> bytes:
        """The payload's projected fields, in its own encoding."""

    def decode(self, payload: bytes) -> dict[str, object]:
        """The document, for filters and indexes. Empty where it is valid by its syntax, but undecodable in fact."""

    def decoder(self, names: Sequence[str]) -> Decode:
        """A `decode` for callers that read only the top-level fields `names`: it may leave out the others."""

    def columns(self, names: Sequence[str]) -> Columns | None:
        """The quickest way to the values of the top-level fields `names`, each given once; a missing one is null. None:
        there is none that is quicker than `decoder`."""

    def merge(self, base: bytes, delta: bytes, unset: PathTree) -> bytes | BadRecord:
        """`base` without the unset fields, with `delta` merged into it (rule P2); or the reason why that is
        impossible."""

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        """The changes from one document to another, with the fields of `key_paths` (rule S3)."""


def malformed(detail: str) -> BadRecord:
    """A payload that is no document of its type; `detail` names the position."""
    return BadRecord(Reason.PAYLOAD_MALFORMED, f"payload: {detail}")


def key_of(values: Sequence[object], paths: Sequence[Steps]) -> bytes | BadRecord:
    """The record key of the values of the key fields (rules K4, K5)."""
    texts: list[str] = []
    for index, value in enumerate(values):
        try:
            texts.append(escape(canonical_text(value)))
        except KeyFieldError as error:
            return _key_field(paths[index], error)
        except ValueError:  # an integer of thousands of digits
            return BadRecord(Reason.KEY_TOO_LARGE, f"key field {path_text(paths[index])} is too long a number")
    key = "|".join(texts)
    if not key:
        return BadRecord(Reason.KEY_REQUIRED, f"key field {path_text(paths[0])} is empty, and a key is never empty")
    try:
        return key.encode()
    except UnicodeEncodeError:
        return BadRecord(Reason.KEY_NOT_UTF8, "key: a key field is not well-formed UTF-8")


def _key_field(path: Steps, error: KeyFieldError) -> BadRecord:
    reason = Reason.KEY_FIELD_MISSING if error.missing else Reason.KEY_FIELD_NOT_SCALAR
    return BadRecord(reason, f"key field {path_text(path)} {error}")
