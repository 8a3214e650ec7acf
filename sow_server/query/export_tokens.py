"""Resume tokens of exports: a position in a part, which only that part of that export accepts (rule Q6)."""

from __future__ import annotations

import hashlib
from typing import Final

from sow_server.engine.values.errors import Reason, StoreError

TAG_BYTES: Final = 8


def write_token(export_id: str, part: int, position: bytes) -> bytes:
    """The token that continues a part behind a key."""
    return _tag(export_id, part, position) + position


def read_token(export_id: str, part: int, token: bytes) -> bytes:
    """The record key at which a part continues. Raises StoreError RESUME_TOKEN_INVALID."""
    position = token[TAG_BYTES:]
    if token and token[:TAG_BYTES] != _tag(export_id, part, position):
        raise StoreError(
            Reason.RESUME_TOKEN_INVALID,
            "resume_token: does not belong to this part of the export; send the token of the last batch, or none",
            field="resume_token",
        )
    return position


def _tag(export_id: str, part: int, position: bytes) -> bytes:
    return hashlib.blake2s(f"{export_id}/{part}/".encode() + position, digest_size=TAG_BYTES).digest()
