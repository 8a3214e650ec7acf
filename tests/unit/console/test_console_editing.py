"""The payload of a record as a text that people edit, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow_client import InvalidArgument, PayloadForm
from sow_console import editing
from sow_console.pages.page import View
from sow_console.writes import WRITES

FORMS = [
    PayloadForm("json"),
    PayloadForm("msgpack"),
    PayloadForm("fix"),
    PayloadForm("nvfix", "|"),
    PayloadForm("binary"),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.message_type)
@given(
    payload=st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode))
    | st.sampled_from(
        [b"35=D\x0155=A\x01", b'{"a": 9.50}', b"\x81\xa1a\xcb\x40\x23\x00\x00\x00\x00\x00\x00", b"a\r\nb"]
    )
)
def test_a_text_that_is_left_as_it_is_is_the_same_payload_or_there_is_none(form: PayloadForm, payload: bytes) -> None:
    """Also after a form of a browser, which sends CRLF."""
    try:
        text = editing.text_of(form, payload)
    except InvalidArgument:
        return
    assert editing.payload_of(form, text) == payload
    assert editing.payload_of(form, text.replace("\n", "\r\n")) == payload


@pytest.mark.parametrize(
    ("form", "payload", "text"),
    [
        (
            PayloadForm("json"),
            b'{"n": 9223372036854775809, "price": 9.50}',
            '{"n": 9223372036854775809, "price": 9.50}',
        ),
        (PayloadForm("msgpack"), b"\x82\xa1a\x01\xa1b\xcb@#\x00\x00\x00\x00\x00\x00", '{"a":1,"b":9.5}'),
        (PayloadForm("fix"), b"35=D\x0155=A\x01", "35=D␁55=A␁"),
        (PayloadForm("nvfix", "|"), b"id=1|", "id=1|"),
        (PayloadForm("binary"), "grüße\n".encode(), "grüße\n"),
    ],
)
def test_payloads_of_every_type_can_be_edited(form: PayloadForm, payload: bytes, text: str) -> None:
    assert editing.text_of(form, payload) == text
    assert editing.hint(form)


@pytest.mark.parametrize(
    ("form", "payload"),
    [
        (PayloadForm("msgpack"), b"\x81\xa1b\xc4\x01\xff"),  # bytes, which JSON lacks
        (PayloadForm("msgpack"), b"\x81\xa1a\xca\x3f\x80\x00\x00"),  # a float of 32 bits would become one of 64
        (PayloadForm("binary"), b"\xff"),
        (PayloadForm("binary"), b"a\0b"),
        (PayloadForm("binary"), b"a\rb"),
        (PayloadForm("fix"), "35=␁\x01".encode()),
        (PayloadForm("json"), b'{"a": "%s"}' % (b"x" * editing.TEXT_BYTES_MAX)),
    ],
)
def test_a_payload_that_would_not_stay_as_it_is_is_not_edited(form: PayloadForm, payload: bytes) -> None:
    with pytest.raises(InvalidArgument):
        editing.text_of(form, payload)


@pytest.mark.parametrize("text", ["", "[]", "1", '{"a": NaN}', '{"a": 1', "{}x"])
def test_a_text_that_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        editing.payload_of(PayloadForm("json"), text)
    assert caught.value.details["field"] == "payload"


def test_a_key_field_that_differs_is_named() -> None:
    assert editing.moved(["/id", "/line"], b'{"id": 1, "line": 2}', b'{"line": 3, "id": 1}') == ["/line"]


def test_an_edit_names_the_version_that_was_seen() -> None:
    """So that a change between the look and the write is not lost."""
    asked: list[dict[str, object]] = []

    class Client:
        async def get(self, topic: str, key: str) -> object:
            return SimpleNamespace(version=7, form=PayloadForm("json"))

        async def describe_topic(self, topic: str) -> object:
            return SimpleNamespace(settings=SimpleNamespace(key=("/id",)))

        async def publish(self, topic: str, payload: bytes, **given: object) -> object:
            asked.append(given)
            return SimpleNamespace(version=8)

    view = cast(View, SimpleNamespace(client=Client()))
    given = {"topic": "orders", "key": "1", "version": "7", "payload": "{}", "ttl": ""}
    asyncio.run(_done(WRITES["edit"].do(view, given)))
    assert asked == [{"key": None, "ttl": None, "keep_ttl": True, "only_if_version": 7}]


async def _done(work: Awaitable[str]) -> str:
    return await work
