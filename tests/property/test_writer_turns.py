"""Whatever callers ask of the writer, each has its turn, its order, and one answer for each request (rule N7)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.queue import QueuedStep
from sow_server.engine.commit.requests import Job, Slice
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.model import Delete, Outcome, Publish, Request
from tests.support.fakes.callers import working_for
from tests.support.stores.stores import Rig

LIGHT: Final = "l"
"""Publishes single records, one after the other."""
CALLERS: Final = f"abc{LIGHT}"
RECORDS_MAX: Final = 4


class Ask(NamedTuple):
    """A caller asks for something, or the writer has a turn (the caller is "")."""

    caller: str
    kind: str = ""
    records: int = 0


asks = st.lists(
    st.one_of(
        st.builds(
            Ask,
            st.sampled_from("abc"),
            st.sampled_from(["publish", "atomic", "delete", "step"]),
            st.integers(1, 3 * RECORDS_MAX),
        ),
        st.sampled_from([Ask(""), Ask(LIGHT, "publish", 1)]),
    ),
    max_size=60,
)


class Watched:
    """A store whose commits are noted, with those that wait for each."""

    def __init__(self, path: Path) -> None:
        self.rig = Rig(path, options=StoreOptions(writer=WriterOptions(commit_records_max=RECORDS_MAX)), syncs=False)
        self.rig.create_topic("orders")
        self.asked = dict.fromkeys(CALLERS, 0)
        self.answered: dict[str, list[int]] = {caller: [] for caller in CALLERS}
        self.seen: dict[str, list[set[str]]] = {caller: [] for caller in CALLERS}
        """For each caller that waits, the commits of others since it has waited or been served: whom they served."""
        writer = self.rig.store.writer
        finish, do_step = writer._finish_jobs, writer._do_step

        def finishing(draft: Draft, parts: list[tuple[Job, Slice]], started: float) -> None:
            self.committed({job.caller for job, _ in parts})
            finish(draft, parts, started)

        def stepping(step: QueuedStep) -> None:
            self.committed({step.caller})
            do_step(step)

        writer._finish_jobs = finishing  # type: ignore[method-assign]  # a spy
        writer._do_step = stepping  # type: ignore[method-assign,assignment]  # a spy

    def committed(self, served: set[str]) -> None:
        for caller in CALLERS:
            if caller in served or self.asked[caller] == len(self.answered[caller]):
                self.seen[caller] = []
                continue
            seen = self.seen[caller]
            seen.append(served)
            # A caller with large requests may meet two commits of another that others did not fill, one of them shared.
            most = len(set().union(*seen)) * (1 if caller == LIGHT else 2)
            assert len(seen) <= most, f"{caller} waits for {seen}"

    def ask(self, ask: Ask) -> None:
        number = self.asked[ask.caller]
        if ask.caller == LIGHT and number > len(self.answered[LIGHT]):
            return
        if number == len(self.answered[ask.caller]):
            self.seen[ask.caller] = []
        self.asked[ask.caller] += 1
        answered = self.answered[ask.caller]

        def done(answer: object) -> None:
            assert ask.kind == "step" or isinstance(answer, Outcome), answer
            answered.append(number)

        keys = [f"{ask.caller}{index}" for index in range(min(ask.records, RECORDS_MAX))]
        requests: dict[str, Callable[[], Request]] = {
            "publish": lambda: Publish("orders", [b"%d" % number] * ask.records, [ask.caller] * ask.records),
            "atomic": lambda: Publish("orders", [b"%d" % number] * len(keys), keys, atomic=True),
            "delete": lambda: Delete("orders", keys),
        }
        with working_for(ask.caller):
            if ask.kind == "step":
                self.rig.store.commits.barrier().then(done)
            else:
                self.rig.store.commits.submit(requests[ask.kind]()).then(done)


@pytest.mark.slow
@settings(deadline=None)
@given(asks)
def test_every_caller_has_its_turn_and_its_order(items: list[Ask]) -> None:
    path = Path(tempfile.mkdtemp())
    try:
        watched = Watched(path)
        for item in items:
            if item.caller:
                watched.ask(item)
            else:
                watched.rig.turn()
        while watched.rig.store.writer.queue.depth != (0, 0):
            watched.rig.turn()
        for caller in CALLERS:
            assert watched.answered[caller] == list(range(watched.asked[caller])), "each once, in order"
            values = [
                int(entry.payload)
                for entry in watched.rig.journal("orders")
                if entry.kind == "put" and entry.key.startswith(caller.encode())
            ]
            assert values == sorted(values)
        assert watched.rig.store.writer.queue.depth == (0, 0)
        watched.rig.close()
    finally:
        shutil.rmtree(path)
