"""What must not get lost, come back, or be told twice while instances replicate (K7, S7, R2 to R6, R12)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_server.engine import replicas
from sow_server.engine.errors import Reason, StoreError
from tests.support.replicas import instance
from tests.support.stores import MINUTE, FakeTime, Rig


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Rig, Rig]:
    """Two instances that send to each other, on one time."""
    time = FakeTime()
    rigs = instance(tmp_path, "a", peers=["b"], time=time), instance(tmp_path, "b", peers=["a"], time=time)
    for rig in rigs:
        rig.create_topic("t")
    return rigs


def test_a_repair_gets_only_rows_that_are_durable(pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """S7, PT1: else a power cut would leave the other instance ahead of this one."""
    a, _ = pair
    a.put("t", "1", ttl=1)
    a.time.tick(MINUTE)
    a.store.sweep()  # not synced by itself
    monkeypatch.setattr(replicas, "SYNC_PATIENCE_SECONDS", 0.0)
    with pytest.raises(StoreError) as refused:
        a.store.replicas.rows(a.topic("t"), [b"1"])
    assert refused.value.reason is Reason.STORE_FAILED
    a.store.sync()
    assert a.store.replicas.rows(a.topic("t"), [b"1"])
