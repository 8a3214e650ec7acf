"""A connection that owes the head of a request, or the rest of a body that was refused, is closed after a while."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from sow_http import app

ANSWERED: Final = b"\r\n\r\nok"
BODY: Final = b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nab"


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading the body, or only after the wait if the path is /slow."""
    if scope["path"] == "/slow":
        await asyncio.sleep(0.2)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nHost: ", b""),
        (BODY, ANSWERED),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /again HTTP/1.1\r\n", ANSWERED),
        (b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n", ANSWERED),
    ],
)
def test_a_client_that_owes_something_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes
) -> None:
    """The last one owes nothing: the answer may take longer than a head may."""
    monkeypatch.setattr(app, "HEAD_SECONDS", 0.05)

    async def life() -> bytes:
        config = uvicorn.Config(answers, log_config=None, http=app._Protocol, timeout_keep_alive=1)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: app._Protocol(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent)
        told = b""
        try:
            while piece := await asyncio.wait_for(reader.read(1_000), 10):
                told += piece
        except ConnectionResetError:
            pass
        writer.close()
        server.close()
        return told

    told = asyncio.run(life())
    assert told.endswith(answer)
    assert told.startswith(b"HTTP/1.1 200") or not answer
