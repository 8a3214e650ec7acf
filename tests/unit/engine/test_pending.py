"""Answers that come later, and those of the writer (sow_peering/answers, engine/pending)."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sow_server.engine.pending import Pending, answered
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Outcome, Publish
from tests.support.stores.stores import BINARY, Rig

REFUSED = StoreError(Reason.OVERLOADED, "no")


def put(key: str) -> Publish:
    return Publish("t", [b"x"], [key])


def test_listeners_hear_the_answer_in_its_turn_and_in_their_order() -> None:
    """answers [1]"""
    pending: Pending[int] = Pending()
    heard: list[object] = []
    pending.then(lambda answer: heard.append(("first", answer)))
    pending.map(lambda answer: answer + 1).then(lambda answer: heard.append(("mapped", answer)))
    pending.then(lambda answer: heard.append(("last", answer)))
    assert heard == []
    pending.settle(7)
    assert heard == [("first", 7), ("mapped", 8), ("last", 7)]


def test_a_listener_that_raises_keeps_the_answer_from_nobody() -> None:
    """answers [4]. Story of the mistake: the listeners behind it, and with them the caller, waited for ever."""
    pending: Pending[int] = Pending()
    heard: list[object] = []

    def fails(_: object) -> None:
        raise ValueError("a fault")

    pending.then(fails)
    pending.then(heard.append)
    mapped = pending.map(lambda answer: answer + 1)
    with pytest.raises(ValueError, match="a fault"):
        pending.settle(7)
    assert (heard, mapped.given) == ([7], 8)


def test_who_listens_later_hears_it_at_once() -> None:
    """answers [2]"""
    heard: list[object] = []
    answered(7).then(heard.append)
    answered(REFUSED).then(heard.append)
    assert heard == [7, REFUSED]


def test_a_refusal_passes_a_change_of_the_answer_and_may_come_of_it() -> None:
    def refuse(answer: int) -> int:
        raise REFUSED

    heard: list[object] = []
    answered(REFUSED).map(lambda answer: heard.append("changed")).then(heard.append)
    answered(7).map(refuse).then(heard.append)
    assert heard == [REFUSED, REFUSED]


@pytest.mark.slow
def test_a_listener_on_another_thread_is_called_once_whenever_the_answer_comes() -> None:
    """answers [2]: jobs on threads queue steps, and the writer may be faster than they."""
    for _ in range(500):
        pending: Pending[int] = Pending()
        heard: list[int | StoreError] = []
        both = threading.Barrier(2)

        def settle(pending: Pending[int] = pending, both: threading.Barrier = both) -> None:
            both.wait()
            pending.settle(7)

        thread = threading.Thread(target=settle)
        thread.start()
        both.wait()
        pending.then(heard.append)
        thread.join()
        assert heard == [7]


# --- awaited ---------------------------------------------------------------------------------------------------------


def beside_the_writer(tmp_path: Path, main: Callable[[Rig], Awaitable[None]]) -> list[dict[str, Any]]:
    """Runs a test on a loop, with the writer's thread; returns the complaints of asyncio, and those of the log about
    answers."""
    rig = Rig(tmp_path)
    rig.create_topic("t", BINARY)
    complaints: list[dict[str, Any]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
        rig.store.start(loop.call_soon_threadsafe)
        try:
            await main(rig)
        finally:
            await loop.run_in_executor(None, rig.close)
        await asyncio.sleep(0)  # the last answers
        gc.collect()

    with capture_logs() as lines:
        asyncio.run(run())
    return complaints + [dict(line) for line in lines if line["event"] == "answer_failed"]


@pytest.mark.slow
def test_an_awaiter_gets_the_answer_or_the_error(tmp_path: Path) -> None:
    async def main(rig: Rig) -> None:
        assert (await rig.store.commits.submit(put("a"))).applied == 1
        with pytest.raises(StoreError) as refused:
            await rig.store.commits.submit(Publish("nowhere", [b"x"], ["a"]))
        assert refused.value.reason is Reason.TOPIC_NOT_FOUND
        assert await answered(7) == 7

    assert beside_the_writer(tmp_path, main) == []


@pytest.mark.slow
def test_cancelling_an_awaiter_cancels_no_change_and_no_other_awaiter(tmp_path: Path) -> None:
    """answers [3]"""

    async def main(rig: Rig) -> None:
        with rig.store.commits.cut_lock:  # nothing is committed meanwhile
            pending = rig.store.commits.submit(put("a"))

            async def outcome() -> Outcome:
                return await pending

            gone, other = asyncio.ensure_future(outcome()), asyncio.ensure_future(outcome())
            await asyncio.sleep(0)
            gone.cancel()
        async with asyncio.timeout(30):
            assert (await other).applied == 1
        assert gone.cancelled()
        assert rig.get("t", "a") is not None

    assert beside_the_writer(tmp_path, main) == []


@pytest.mark.slow
def test_a_store_that_closes_answers_everything_and_nobody_has_to_hear(tmp_path: Path) -> None:
    """answers [3]: neither an answer that nobody awaits nor a refusal whose awaiter has gone is a complaint."""

    async def main(rig: Rig) -> None:
        store = rig.store
        with store.commits.cut_lock:
            first = store.commits.submit(put("a"))
            refused = store.commits.submit(Publish("nowhere", [b"x"], ["a"]))
            gone = asyncio.ensure_future(_awaited(store.commits.submit(Publish("nowhere", [b"x"], ["b"]))))
            await asyncio.sleep(0)
            gone.cancel()
            closing = asyncio.get_running_loop().run_in_executor(None, rig.close)
        await closing
        assert (await first).applied == 1
        heard: list[object] = []
        refused.then(heard.append)
        assert isinstance(heard[0], StoreError)
        with pytest.raises(StoreError) as error:
            store.commits.submit(put("late"))
        assert error.value.reason is Reason.STOPPING

    assert beside_the_writer(tmp_path, main) == []


async def _awaited(pending: Pending[Outcome]) -> Outcome:
    return await pending
