"""Consumers of durable subscriptions: both clients, on a server in this process."""

from __future__ import annotations

import gc
import tempfile
import threading
from collections.abc import Iterator

import pytest

from sow_client import (
    Cancelled,
    Client,
    DurableSubscription,
    NotFound,
    Unavailable,
)
from tests.support.fakes.followed import Servers
from tests.support.fakes.kept_durable import NAME, SECONDS_MAX, Durables, Kept
from tests.support.fakes.subscriptions import TOPIC, Journal, put, refusal
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]  # a fixture


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """On a unix socket: no other test takes its port. Clients come back without waiting."""
    monkeypatch.setattr("sow_client._statuses.BACKOFF_SECONDS_FIRST", 0.0)
    with tempfile.TemporaryDirectory(prefix="sow") as folder:
        made = Servers(f"unix:{folder}/sow")
        yield made
        made.stop()


def kept_of(keys: str) -> Kept:
    journal = Journal()
    for key in keys:
        journal.commit(put(key, {}))
    return Kept(journal)


def test_acknowledged_changes_do_not_come_again(connect: Connect, servers: Servers) -> None:
    """Each change is acknowledged as it is done; while a call is under way they gather, and the last call goes out
    before the block is left."""
    durables = Durables(kept_of("abcdefgh" * 50))
    durables.kept.answers.clear()
    servers.start(durables)
    with connect(servers.address) as client:
        with client.durable(TOPIC, NAME) as durable:
            for change in durable:
                durable.acknowledge(change)
                if change.bookmark == "e0.300":
                    durables.kept.answers.set()
                    break
        assert durables.kept.at == 300
        assert len(durables.kept.acknowledged) < 5
        with client.durable(TOPIC, NAME) as durable:
            assert next(durable).bookmark == "e0.301"
        assert durables.kept.at == 300
        with client.durable(TOPIC, NAME) as durable:
            assert next(durable).bookmark == "e0.301"
            durable.acknowledge("e0.301")
            durable.flush()
            assert durables.kept.at == 301
            assert (durable.created, durable.reset, durable.gap) == (False, False, None)
        with pytest.raises(Cancelled):
            durable.acknowledge("e0.302")


def test_an_acknowledgement_goes_out_by_itself_and_flush_waits_for_it(connect: Connect, servers: Servers) -> None:
    durables = Durables(kept_of("abc"))
    servers.start(durables)
    with connect(servers.address) as client, client.durable(TOPIC, NAME) as durable:
        durable.acknowledge(next(durable))
        durables.wait_for(lambda: durables.kept.at == 1, "the first")
        durable.acknowledge("e0.3")
        assert [change.key for change in (next(durable), next(durable))] == ["b", "c"]
        durable.flush()
        assert durables.kept.at == 3
        durable.flush()


def test_the_next_call_raises_the_error_of_an_acknowledgement(connect: Connect, servers: Servers) -> None:
    """Which may be leaving the block; but what else ends it says more."""
    durables = Durables(kept_of("abc"))
    durables.kept.refuses = refusal("DURABLE_NOT_FOUND")
    servers.start(durables)

    def consume(client: Client, *, flushes: bool = False, mistake: Exception | None = None) -> None:
        with client.durable(TOPIC, NAME) as durable:
            durable.acknowledge(next(durable))
            if flushes:
                durable.flush()
                pytest.fail("flush told nothing")
            if mistake is not None:
                raise mistake

    with connect(servers.address) as client:
        with pytest.raises(NotFound):
            consume(client, flushes=True)
        with pytest.raises(NotFound):
            consume(client)
        with pytest.raises(KeyError):
            consume(client, mistake=KeyError("a mistake"))


def _come_back(durables: Durables) -> None:
    """A restarted server knows no attachment, and hands over entries only to a new one."""
    durables.kept.forgotten = True
    for key in "abcde" * 4:
        durables.kept.journal.commit(put(key, {}))


def test_calls_that_break_and_a_restart_are_not_noticed(connect: Connect, servers: Servers) -> None:
    durables = Durables(kept_of("abcde" * 4), [1, 3, 10, 4])
    servers.start(durables)
    seen: list[str | None] = []
    with connect(servers.address) as client, client.durable(TOPIC, NAME, batch_size=2) as durable:
        for change in durable:
            seen.append(change.bookmark)
            if len(seen) % 3 == 0:
                durable.acknowledge(change)
            if len(seen) == 20:
                servers.stop()
                _come_back(durables)
                servers.start(durables)
            if len(seen) == 40:
                durable.acknowledge(change)
                break
    assert seen == [f"e0.{number}" for number in range(1, 41)]
    assert durables.kept.at == 40


def test_letting_go_of_a_consumer_ends_its_call_and_its_thread_without_the_collector(servers: Servers) -> None:
    durables = Durables(kept_of("abc"))
    servers.start(durables)
    gc.disable()
    try:
        with Client(servers.address) as client:
            durable: DurableSubscription | None = client.durable(TOPIC, NAME)
            assert durable is not None
            durable.acknowledge(next(durable))
            durable.flush()
            durables.wait_for(lambda: durables.active == 1, "the call")
            durable = None
            durables.wait_for(lambda: durables.active == 0, "its end")
            for thread in threading.enumerate():
                if thread.name == "sow-acknowledge":
                    thread.join(SECONDS_MAX)
                    assert not thread.is_alive()
    finally:
        gc.enable()


def test_closing_from_another_thread_ends_the_wait_and_keeps_acknowledgements(servers: Servers) -> None:
    durables = Durables(kept_of("ab"))
    servers.start(durables)
    with Client(servers.address) as client:
        durable = client.durable(TOPIC, NAME)
        durable.acknowledge(next(durable))
        closing = threading.Timer(0.0, durable.close)
        next(durable)
        closing.start()
        assert list(durable) == []
        closing.join()
        with pytest.raises(Cancelled):
            durable.acknowledge("e0.2")
    assert durables.kept.at == 1


def test_closing_does_not_wait_for_a_server_that_has_ended(
    connect: Connect, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sow_client._durable.CLOSE_SECONDS_MAX", 0.0)
    durables = Durables(kept_of("ab"))
    servers.start(durables)
    with connect(servers.address, connect_timeout=0.2) as client, client.durable(TOPIC, NAME) as durable:
        change = next(durable)
        servers.stop()
        durable.acknowledge(change)
    assert durables.kept.at == 0, "it comes again"


def test_a_flush_raises_the_error_that_prevents_acknowledgement(connect: Connect, servers: Servers) -> None:
    durables = Durables(kept_of("ab"))
    servers.start(durables)
    with connect(servers.address, connect_timeout=0.1) as client:
        durable = client.durable(TOPIC, NAME, retry_for=0.3)
        change = next(durable)
        servers.stop()
        durable.acknowledge(change)
        with pytest.raises(Unavailable):
            durable.flush()
        durable.close()
