"""JSON documents without the fields that a reader does not need, where that costs less than to send them.

[1]  The fields that were named keep their published bytes. A document that msgspec cannot take apart stays whole.
[2]  A batch is left as it is unless its documents shrink by `SAVED_BYTES_MIN` on average, by a sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from sow_server.engine.formats.levels import fit_for_msgspec
from sow_server.services.wire.convert import invalid

FIELDS_MAX: Final = 100
"""Fields that a request may name."""
FIELD_CHARS_MAX: Final = 10_000
"""Fields with longer names together are not left out: the compiled sets are kept."""
SAVED_BYTES_MIN: Final = 256
"""Up to some 400 saved bytes, taking a document apart costs the server at most 0.05 µs more CPU than to send it whole;
beyond that it costs less. The reader saves 0.5 µs and more. benchmarks/results.md has the figures."""
SAMPLE: Final = 16
"""Documents of a batch that are tried first."""
FIELD_SETS_KEPT: Final = 256
"""Compiled sets of fields that are kept."""

Narrow = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Leaves unneeded fields out of the documents of a batch, or returns them as they are."""


def fields(wanted: Sequence[str]) -> tuple[str, ...]:
    """The fields to keep, as a request names them; empty: all. Raises StoreError INVALID_ARGUMENT."""
    if len(wanted) > FIELDS_MAX:
        raise invalid("fields", f"{len(wanted)} are more than the limit of {FIELDS_MAX}")
    return tuple(sorted(set(wanted))) if sum(map(len, wanted)) <= FIELD_CHARS_MAX else ()


@lru_cache(FIELD_SETS_KEPT)
def narrower(names: tuple[str, ...]) -> Narrow | None:
    """Keeps the top-level fields `names`; None: documents stay whole."""
    if not names or not fit_for_msgspec(names) or any(json.dumps(name) != f'"{name}"' for name in names):
        return None  # msgspec takes no name that JSON escapes
    # Generated names, because a field may be called anything.
    attributes = [f"f{index}" for index in range(len(names))]
    kept = msgspec.defstruct(
        "Kept",
        [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in attributes],
        rename=dict(zip(attributes, names, strict=True)),
        gc=False,
    )
    decode, encode = msgspec.json.Decoder(kept).decode, msgspec.json.Encoder().encode

    def narrowed(document: bytes) -> bytes:
        try:
            return encode(decode(document))
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return document

    def narrow(documents: Sequence[bytes]) -> Sequence[bytes]:
        sample = documents[:: -(-len(documents) // SAMPLE) or 1]
        saved = sum(len(document) - len(narrowed(document)) for document in sample)
        return list(map(narrowed, documents)) if saved > SAVED_BYTES_MIN * len(sample) else documents

    return narrow
