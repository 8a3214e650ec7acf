"""The connection of a subcommand."""

from __future__ import annotations

import signal
from typing import Any, NoReturn

import pytest

import sow_client
from sow_cli.exits import Terminated
from sow_cli.session import Session, connect


def test_a_sigterm_waits_until_the_asynchronous_client_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the exception came in the middle of gRPC's channel, and `sow bench` crashed and left its topic behind."""
    made: list[str] = []

    def make(server: str, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        made.append(server)

    def terminate(number: int, frame: object) -> NoReturn:
        raise Terminated

    monkeypatch.setattr(sow_client, "AsyncClient", make)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        session = Session("127.0.0.1:1", None, connect)
        with pytest.raises(Terminated):
            session.async_client()
        assert made == ["127.0.0.1:1"]
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        signal.signal(signal.SIGTERM, before)
