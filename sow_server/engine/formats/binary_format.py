"""Opaque payloads."""

from __future__ import annotations

from collections.abc import Sequence

from sow_server.engine.formats.deltas import Difference
from sow_server.engine.formats.paths import PathTree, Steps
from sow_server.engine.formats.payloads import BadRecord, Columns, Decode, DeriveKeys, Projection


class BinaryFormat:
    """Opaque bytes: any payload is one, nothing can be derived from it."""

    def check(self, payload: bytes) -> BadRecord | None:
        return None

    def derive_keys(self, paths: Sequence[Steps]) -> DeriveKeys:
        raise AssertionError("a binary topic has no key fields: check_settings refuses them")

    def project(self, payload: bytes, projection: Projection) -> bytes:
        raise AssertionError("a binary payload has no fields: check_projection refuses them")

    def decode(self, payload: bytes) -> dict[str, object]:
        return {}

    def decoder(self, names: Sequence[str]) -> Decode:
        return self.decode

    def columns(self, names: Sequence[str]) -> Columns | None:
        return None

    def merge(self, base: bytes, delta: bytes, unset: PathTree) -> bytes | BadRecord:
        raise AssertionError("a binary payload has no fields: a delta publish is refused")

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        raise AssertionError("a binary payload has no fields: a delta subscription is refused")
