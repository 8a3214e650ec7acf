"""Payloads by message type (rule K2): the operations of a `Format`, and the values that they take and return. Pure.

A payload is stored exactly as published. New payloads are made by `project` for a query, `merge` for a delta publish,
and `difference` for a delta subscription.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sow_server.engine.formats.deltas import Difference, UnsetTree
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.keys import KeyFieldError, canonical_text, escape, path_text


class BadRecord(NamedTuple):
    """The reason why a record has no key, or is no document of its message type."""

    reason: Reason
    message: str


KeyColumn = list["bytes | BadRecord"]
Decode = Callable[[bytes], dict[str, object]]
DeriveKeys = Callable[[Sequence[bytes]], KeyColumn]
Steps = tuple[str, ...]


class Projection(NamedTuple):
    """The fields of a payload that a query returns: only `include`, or all except `exclude` (rule Q2); and of these
    none of `hidden`, in no element of an array either (rule A5)."""

    include: tuple[Steps, ...] = ()
    exclude: tuple[Steps, ...] = ()
    hidden: tuple[Steps, ...] = ()


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

    def merge(self, base: bytes, delta: bytes, unset: UnsetTree) -> bytes | BadRecord:
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
