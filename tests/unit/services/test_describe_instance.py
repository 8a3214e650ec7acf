"""An instance tells who it is and whether it serves (rule F1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sow.v1 import admin_pb2, replication_pb2, types_pb2
from sow_peering import InstanceIdentity
from sow_replication.greeting import Begin, Known, decide
from sow_replication.messages import PROTOCOL, instance_of
from tests.support.fakes.guarded import GuardedParts
from tests.support.oracles.access import identity
from tests.support.stores.stores import Rig


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[GuardedParts]:
    rig = Rig(tmp_path)
    with GuardedParts(rig, identity("desk")) as made:
        yield made
    rig.close()


def test_one_answer_tells_name_id_epoch_and_whether_it_serves(parts: GuardedParts) -> None:
    (starting,) = parts.answers("desk", "DescribeInstance")
    parts.healthy.set("", serving=True)
    (serving,) = parts.answers("desk", "DescribeInstance")

    instance = parts.rig.store.instance
    assert (serving.name, serving.id, serving.journal_epoch) == ("here", instance.id, instance.epoch)
    assert (starting.serving, serving.serving) == (False, True)


def test_a_watcher_hears_each_change_and_its_call_ends_with_the_stop(parts: GuardedParts) -> None:
    """A call that went on would hold up the stop for its whole grace."""
    told: list[bool] = []

    async def watch() -> None:
        answers = parts.handlers["DescribeInstance"](
            admin_pb2.DescribeInstanceRequest(watch=True), parts.call("desk", "DescribeInstance")
        )
        told.append((await anext(answers)).serving)
        parts.healthy.set("", serving=True)
        told.append((await anext(answers)).serving)
        parts.healthy.set("another service", serving=True)
        parts.healthy.stopping()
        told.extend([answer.serving async for answer in answers])

    parts._run(watch())

    assert told == [False, True, False]


OWN = InstanceIdentity("a", "id-a", "epoch")


@pytest.mark.parametrize(("own", "theirs"), [("", "blue"), ("blue", ""), ("blue", "blue"), ("", "")])
def test_an_instance_without_a_cluster_or_of_the_same_one_is_accepted(own: str, theirs: str) -> None:
    assert isinstance(_decided(own, theirs), Begin)


def test_an_instance_of_another_cluster_is_refused_with_both_names() -> None:
    """R11."""
    refused = _decided("blue", "green")
    assert not isinstance(refused, Begin)
    assert refused.reason == types_pb2.ERROR_REASON_PEER_OTHER_CLUSTER
    assert "blue" in refused.message
    assert "green" in refused.message


def _decided(own: str, theirs: str) -> Any:
    peer = instance_of(InstanceIdentity("b", "id-b", "epoch"), theirs)
    hello = replication_pb2.Hello(protocol=PROTOCOL, instance=peer, topics_pattern=".*")
    return decide(hello, Known(OWN, accepted=True, live=None, row=None, sends=None, head=0, cluster=own))
