"""The payload of a record as a text that people edit, and that text as a payload. Pure.

[1]  A payload is edited only if its text, unchanged, is the payload again, byte for byte. A number of JSON keeps
     its text.
[2]  A form of a browser sends CRLF for each line break; the payload gets LF.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sow_client import InvalidArgument, PayloadForm
from sow_client._documents import decode
from sow_console import documents

TEXT_BYTES_MAX: Final = 65_536
"""A longer payload is not edited here: a page that holds it would be slow to type in."""
SEPARATOR_SHOWN: Final = "␁"
"""Stands for the separator of fix and nvfix where that is the control character 1, which nobody can type."""
_SEPARATOR: Final = "\x01"


def text_of(form: PayloadForm, payload: bytes) -> str:
    """The text. Raises InvalidArgument with the reason where it cannot be edited here ([1])."""
    if len(payload) > TEXT_BYTES_MAX:
        raise _unfit(f"has {len(payload):,} bytes; at most {TEXT_BYTES_MAX:,} can be edited here")
    source = form.json(payload) if form.message_type == "msgpack" else payload
    try:
        text = "" if source is None else source.decode()
        if form.message_type in ("fix", "nvfix"):
            text = text.replace(_SEPARATOR, SEPARATOR_SHOWN)
        if payload_of(form, text) == payload and "\0" not in text:
            return text
    except (UnicodeDecodeError, InvalidArgument):
        pass  # as below
    lacks = "values that JSON lacks" if form.message_type == "msgpack" else "bytes that a form cannot hold"
    raise _unfit(f"has {lacks}, so that it would not stay as it is; publish it with the command or a client")


def payload_of(form: PayloadForm, text: str) -> bytes:
    """The payload. Raises InvalidArgument."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if form.message_type in ("fix", "nvfix"):
        return text.replace(SEPARATOR_SHOWN, _SEPARATOR).encode()
    if form.message_type == "binary":
        return text.encode()
    try:
        document = decode(text.encode())
    except (ValueError, RecursionError) as error:
        raise _unfit(f"is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise _unfit('is no JSON object, such as {"id": 1}')
    return form.encode(document) if form.message_type == "msgpack" else text.encode()


def hint(form: PayloadForm) -> str:
    """How to write it."""
    match form.message_type:
        case "msgpack":
            return "as JSON; it is published as MessagePack, with 64-bit integers and doubles"
        case "fix" | "nvfix" if form.separator == _SEPARATOR:
            return f"the fields, each with {SEPARATOR_SHOWN} behind it: it stands for the separator"
        case "fix" | "nvfix":
            return f"the fields, each with {form.separator} behind it"
        case "binary":
            return "text, published as UTF-8"
    return "JSON; numbers keep their text"


def moved(keys: Sequence[str], before: bytes, after: bytes) -> list[str]:
    """The key fields whose values differ between two JSON documents."""
    was, now = documents.leaves(before) or {}, documents.leaves(after) or {}
    return [path for path in keys if was.get(path) != now.get(path)]


def _unfit(message: str) -> InvalidArgument:
    return InvalidArgument(f"the payload {message}", reason="PAYLOAD_MALFORMED", details={"field": "payload"})
