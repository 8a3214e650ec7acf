"""The reading of requests: each fault names its argument, header, line or body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import pytest
from starlette.requests import Request
from starlette.types import Message

from sow_http import arguments, loads
from sow_http.arguments import Arguments, body, key_field, media_type, pieces, version_of
from sow_http.callers import token_of
from sow_http.problems import Refused

_Value = TypeVar("_Value")
KNOWN = ("top", "select", "format")


def request_of(query: str = "", sent: list[bytes] | None = None, **headers: str) -> Request:
    """A request whose body comes in these pieces, and then stalls."""
    left = list(sent or [])

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "query_string": query.encode(), "headers": named}, receive)


@pytest.mark.parametrize(
    ("query", "field", "read"),
    [
        ("tpo=1", "tpo", lambda given: given),
        ("top=1&top=2", "top", lambda given: given.number("top")),
        ("top=-1", "top", lambda given: given.number("top")),
        ("top=1.5", "top", lambda given: given.number("top")),
        ("top=" + "9" * 19, "top", lambda given: given.number("top")),
        ("format=xml", "format", lambda given: given.one_of("format", ("json", "ndjson"), "json")),
    ],
)
def test_an_argument_that_is_wrong_is_named(query: str, field: str, read: Callable[[Arguments], object]) -> None:
    with pytest.raises(Refused) as refused:
        read(Arguments(request_of(query), KNOWN))
    assert refused.value.details == {"field": field}
    assert refused.value.message.startswith(f"{field}: ")


def test_arguments_are_read_with_commas_and_by_default() -> None:
    given = Arguments(request_of("select=/a,/b&select=%2Fc&top=7"), KNOWN)
    assert (given.texts("select"), given.number("top")) == (["/a", "/b", "/c"], 7)
    assert given.one_of("format", ("json", "ndjson"), "json") == "json"
    assert Arguments(request_of("top="), KNOWN).number("top") is None


@pytest.mark.parametrize("tag", ["17", '"17"'])
def test_a_version_is_read_from_its_tag(tag: str) -> None:
    assert version_of(request_of(if_match=tag), "If-Match") == 17


@pytest.mark.parametrize("tag", ['"x"', "*", '""', '"17", "18"', '"' + "1" * 20 + '"'])
def test_a_tag_that_is_none_of_a_record_is_refused(tag: str) -> None:
    with pytest.raises(Refused, match="If-Match: "):
        version_of(request_of(if_match=tag), "If-Match")


@pytest.mark.parametrize("given", ["Basic eA==", "Bearer", "Bearer  ", "token", "Bearer " + "x" * 20_000])
def test_a_credential_that_is_no_token_is_refused(given: str) -> None:
    with pytest.raises(Refused) as refused:
        token_of(request_of(authorization=given))
    assert refused.value.status == 401


def test_a_token_is_what_stands_behind_bearer() -> None:
    assert token_of(request_of(authorization="bearer  abc ")) == "abc"
    assert token_of(request_of()) is None
    assert media_type(request_of(content_type="Application/JSON; charset=utf-8")) == "application/json"


@pytest.mark.parametrize(
    ("document", "found"),
    [({"a": {"b": 5}}, 5), ({"a": {"b": None}}, None), ({"a": [1]}, None), ([], None), ({"a": {"b": {}}}, None)],
)
def test_a_key_is_found_at_its_path(document: object, found: object) -> None:
    assert key_field(document, "/a/b") == found


# ---- bodies ----


def outcome(work: Awaitable[_Value]) -> _Value:
    async def wait() -> _Value:
        return await work

    return asyncio.run(wait())


async def all_of(generator: AsyncGenerator[bytes, None]) -> list[bytes]:
    return [piece async for piece in generator]


def test_a_body_that_stalls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "BODY_SECONDS", 0.01)
    with pytest.raises(Refused, match=r"nothing has come for 0\.01 s") as refused:
        outcome(all_of(pieces(request_of(sent=[b"{"]))))
    assert refused.value.status == 408


def test_a_body_that_drips_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes in time, and yet the whole would take for ever."""
    monkeypatch.setattr(arguments, "WHOLE_BODY_SECONDS", 0.01)
    with pytest.raises(Refused, match=r"more than 0\.01 s") as refused:
        outcome(body(request_of(sent=[b"{"]), 100))
    assert refused.value.status == 408


@pytest.mark.parametrize("announced", ["", "1000"])
def test_a_body_that_is_too_large_is_refused_before_it_is_whole(announced: str) -> None:
    headers = {"content_length": announced} if announced else {}
    with pytest.raises(Refused) as refused:
        outcome(body(request_of(sent=[b"x" * 60, b"x" * 60], **headers), 100))
    assert refused.value.status == 413


def test_lines_are_taken_across_pieces_and_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "PAYLOAD_BYTES_MAX", 8)
    taken: list[bytes] = []
    take_note, lines = taken.append, loads.Lines()

    async def take(*sent: bytes) -> None:
        async for line in lines.take(request_of(sent=list(sent))):
            take_note(line)

    with pytest.raises(Refused, match="line 5: it exceeds 8 bytes; lines before it are published"):
        outcome(take(b'{"a', b'":1}', b'\n\n{"b":2}\n \n12345', b"6789"))
    assert taken == [b'{"a":1}', b'{"b":2}']
