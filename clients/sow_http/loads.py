"""A body of lines, each a document, as publishes: streamed, and told line by line.

[1]  The answer counts what the server has acknowledged, also where the body is cut, stalls, or has a line too large.
[2]  A line that is not complete is not published.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sow_client import AsyncClient, SowError
from sow_client._documents import decode
from sow_client._keys import KeyField
from sow_client._publish_columns import PAYLOAD_BYTES_MAX
from sow_client.errors import PublishFailed, Refusal
from sow_http import problems
from sow_http.arguments import Arguments, key_field, media_type, pieces, wrong_type
from sow_http.problems import Refused

TYPES: Final = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/json")
REFUSALS_MAX: Final = 1_000
"""Refused lines that an answer names."""
EMPTY_LINES_MAX: Final = 10_000
LOAD: Final = {
    "key": "the field of the document that is the key, such as /id, for a topic without key fields",
    "ttl": "the lifetime of each record, such as 10m",
}
_LOG: Final = logging.getLogger("sow_http")


class Lines:
    """Counts lines, and remembers the refused ones."""

    def __init__(self, key_path: str | None = None) -> None:
        self._key_path = key_path
        self.lines = 0
        self.refused = 0
        self.refusals: list[dict[str, object]] = []
        self._empty: list[int] = []
        """For each empty line, the number of records before it."""
        self._records = 0

    async def take(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The lines of the body that are not empty."""
        left = bytearray()
        async for piece in pieces(request):
            left += piece
            if b"\n" in piece:  # else a long line would be copied for each piece of it
                *whole, left = left.split(b"\n")
                for line in whole:
                    if self._takes(line):
                        yield bytes(line)
            if len(left) > PAYLOAD_BYTES_MAX:
                raise self._too_large()
        if left and self._takes(left):
            yield bytes(left)

    def _takes(self, line: bytearray) -> bool:
        if len(line) > PAYLOAD_BYTES_MAX:
            raise self._too_large()
        self.lines += 1
        if not line.strip():
            self._empty.append(self._records)
            if len(self._empty) > EMPTY_LINES_MAX:
                raise Refused(400, f"line {self.lines}: more than {EMPTY_LINES_MAX} lines are empty", field="body")
            return False
        self._records += 1
        return True

    def _too_large(self) -> Refused:
        at = f"line {self.lines + 1}: it exceeds {PAYLOAD_BYTES_MAX} bytes; lines before it are published"
        return Refused(413, at, reason="PAYLOAD_TOO_LARGE", field="body")

    def refuse(self, refusal: Refusal) -> None:
        """Remembers a refusal by the number of its line, from 1."""
        self.refused += 1
        if len(self.refusals) < REFUSALS_MAX:
            line = refusal.index + 1 + bisect(self._empty, refusal.index)
            message = refusal.message
            if refusal.reason == "KEY_REQUIRED" and self._key_path is not None:
                message = f"it has no {self._key_path} that could be a key"
            self.refusals.append({"line": line, "reason": refusal.reason, "message": message})


async def load(request: Request, client: AsyncClient) -> Response:
    """Publishes each line of the body."""
    arguments = Arguments(request, LOAD)
    if media_type(request) not in TYPES:
        raise wrong_type(media_type(request), TYPES)
    topic, key_path = request.path_params["topic"], arguments.text("key")
    lines = Lines(key_path)
    ended: SowError | None = None
    publisher = client.publisher(topic, ttl=arguments.text("ttl"), on_refusal=lines.refuse)
    try:
        async for line in lines.take(request):
            await publisher.publish(line, key=None if key_path is None else _key(line, key_path))
    except ClientDisconnect:
        ended = Refused(400, "body: it was cut", reason="BODY_CUT", field="body")
    except SowError as error:
        ended = error
    try:
        await asyncio.shield(publisher.close())
    except PublishFailed:
        pass  # the refusals are told one by one
    except SowError as error:
        ended = ended or error
    told: Mapping[str, object] = {
        "lines": lines.lines,
        "applied": publisher.acknowledged - lines.refused,
        "refused": lines.refused,
        "refusals": lines.refusals,
    }
    if ended is None and lines.refusals:
        first = lines.refusals[0]
        text = f"{lines.refused} of {lines.lines} lines were refused; line {first['line']}: {first['message']}"
        ended = Refused(422, text, reason=str(first["reason"]), field="body")
    if ended is None:
        return problems.answer(told)
    if ended.reason == "BODY_CUT":
        # The client may not read the answer any more.
        _LOG.warning("%s: %s; %d lines are published", topic, ended.message, told["applied"])
    return problems.response(ended, told)


def _key(line: bytes, path: str) -> KeyField:
    """The key of a line. A line without one gets an empty key: the server refuses it by its number, as it does others,
    and lines after it are published."""
    try:
        value = key_field(decode(line), path)
    except (ValueError, RecursionError):
        value = None
    return "" if value is None else value
