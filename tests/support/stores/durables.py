"""Durables of the topic `orders`: short ways to write, to look, and to make the calls of the administration.

`rig` is a fixture for test modules to import.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sow_server.engine.durables import ClearedBacklogs, Durable, DurableFigures, RewindTo
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import TopicSettings
from tests.support.stores.stores import Rig
from tests.support.stores.subscribers import Subscribers

JSON = TopicSettings(retain_bytes=None)
TO_EARLIEST = RewindTo()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders", JSON)
    yield rig
    rig.close()


def put(rig: Rig, *keys: str, topic: str = "orders", px: int = 1) -> None:
    """One change a commit."""
    for key in keys:
        rig.put(topic, key, b'{"px":%d}' % px)


def durable(rig: Rig, name: str = "d", topic: str = "orders") -> Durable:
    return rig.store.durables.find(rig.topic(topic), name)


def figures(rig: Rig, name: str = "d", topic: str = "orders") -> DurableFigures:
    return rig.store.durable_commits.figures(rig.topic(topic), name)[1]


def floor(rig: Rig, topic: str = "orders") -> int:
    return rig.topic(topic).statistics.floor_sequence


def rewind(
    subscribers: Subscribers,
    to: RewindTo = TO_EARLIEST,
    *,
    name: str = "d",
    force: bool = False,
) -> tuple[Durable, int]:
    topic = subscribers.rig.topic("orders")
    answers: list[tuple[Durable, int] | StoreError] = []
    subscribers.consumers.rewind(topic, name, to, force=force).then(answers.append)
    return subscribers.answer(answers)


def delete(subscribers: Subscribers, name: str = "d", *, force: bool = False) -> None:
    answers: list[Durable | StoreError] = []
    subscribers.consumers.delete(subscribers.rig.topic("orders"), name, force=force).then(answers.append)
    assert subscribers.answer(answers).name == name


def clear(subscribers: Subscribers, name: str = "d") -> int:
    topic = subscribers.rig.topic("orders")
    answers: list[ClearedBacklogs | StoreError] = []
    subscribers.consumers.clear(topic, name).then(answers.append)
    return subscribers.answer(answers).entries


def crash(subscribers: Subscribers, name: str = "d", *, acknowledged: int | None = None, **attach: Any) -> Any:
    """A consumer that takes what there is, acknowledges up to some position, and goes away for good."""
    follower = subscribers.attach("orders", name, **attach)
    if acknowledged is not None:
        follower.acknowledge(acknowledged)
    follower.close()
    subscribers.settle()
    return follower


def refused(error: pytest.ExceptionInfo[StoreError]) -> Reason:
    return error.value.reason
