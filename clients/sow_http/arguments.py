"""The reading of requests: their arguments, their conditions, their bodies. Each fault names the argument."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from typing import Final

from starlette.requests import ClientDisconnect, Request

from sow_client._grouping import divided
from sow_client._keys import KeyField
from sow_client._parameters import Parameters, parameters_of
from sow_http.problems import Refused

BODY_SECONDS: Final = 30
"""The longest wait for the next piece of a body."""
WHOLE_BODY_SECONDS: Final = 120
"""The longest time for the body of one record. A load may take as long as lines come."""
INTEGER_DIGITS_MAX: Final = 18


class Arguments:
    """The arguments in the address of a request. Raises Refused for one that it does not know, or that is there twice
    where one is needed."""

    def __init__(self, request: Request, known: Collection[str]) -> None:
        self._given = request.query_params
        for name in self._given:
            if name not in known:
                raise Refused(400, f"{name}: there is no such argument; known: {', '.join(known)}", field=name)

    def text(self, name: str) -> str | None:
        """The one value; None: it is absent or empty."""
        values = self._given.getlist(name)
        if len(values) > 1:
            raise Refused(400, f"{name}: is given {len(values)} times", field=name)
        return values[0] or None if values else None

    def texts(self, name: str) -> list[str] | None:
        """The values between commas, of all that are given; None: there is none."""
        return [part for value in self._given.getlist(name) for part in divided(value) if part] or None

    def number(self, name: str) -> int | None:
        """A whole number; None: it is absent."""
        text = self.text(name)
        if text is None:
            return None
        if not text.isdecimal() or len(text) > INTEGER_DIGITS_MAX:
            raise Refused(400, f"{name}: {text!r} is no whole number of at least 0", field=name)
        return int(text)

    def one_of(self, name: str, values: Collection[str], default: str) -> str:
        """One of these texts."""
        text = self.text(name) or default
        if text not in values:
            raise Refused(400, f"{name}: {text!r} is none of {', '.join(values)}", field=name)
        return text

    def parameters(self) -> Parameters | None:
        """The values of the names in the filter."""
        text = self.text("params")
        return None if text is None else parameters_of(text)


def version_of(request: Request, header: str) -> int | None:
    """The version in a header such as `If-Match: "17"`; None: the header is absent."""
    text = request.headers.get(header)
    if text is None:
        return None
    version = text.strip().strip('"')
    if not version.isdecimal() or not 0 < len(version) <= INTEGER_DIGITS_MAX + 1:
        raise Refused(400, f'{header}: {text!r} is not the ETag of a record, such as "17"', field=header)
    return int(version)


def key_field(document: object, path: str) -> KeyField | None:
    """The value at a path, such as /a/b, that can be a key, or None."""
    for part in path.strip("/").split("/"):
        document = document.get(part) if isinstance(document, Mapping) else None
    return document if isinstance(document, str | int | float | bool) else None


def media_type(request: Request) -> str:
    """The type of the body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def wrong_type(given: str, taken: Iterable[str]) -> Refused:
    """The refusal of a body of a type that is not taken."""
    told = f"Content-Type: {given or 'none'} is none of {', '.join(taken)}"
    if given == "application/x-www-form-urlencoded":
        told += "; for curl: -H 'Content-Type: application/json'"  # its -d sends that type
    return Refused(415, told, field="Content-Type")


async def pieces(request: Request) -> AsyncGenerator[bytes, None]:
    """The body as it comes. Raises Refused where it stalls, and ClientDisconnect where it breaks off."""
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                piece = await anext(stream, None)
        except TimeoutError:
            raise Refused(
                408, f"body: nothing has come for {BODY_SECONDS} s", reason="BODY_CUT", field="body"
            ) from None
        if piece is None:
            return
        if piece:
            yield piece


async def body(request: Request, bytes_max: int) -> bytes:
    """The whole body. Raises Refused for one that is larger, stalls, or is cut."""
    too_large = Refused(413, f"body: it exceeds {bytes_max} bytes", reason="PAYLOAD_TOO_LARGE", field="body")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise too_large
    made = bytearray()
    try:
        async with asyncio.timeout(WHOLE_BODY_SECONDS):
            async for piece in pieces(request):
                made += piece
                if len(made) > bytes_max:
                    raise too_large
    except TimeoutError:
        raise Refused(
            408, f"body: it takes more than {WHOLE_BODY_SECONDS} s", reason="BODY_CUT", field="body"
        ) from None
    except ClientDisconnect:
        raise Refused(400, "body: it was cut; nothing was written", reason="BODY_CUT", field="body") from None
    return bytes(made)
