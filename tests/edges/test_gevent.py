"""Programs in which gevent has replaced threads by greenlets."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from sow_client import AsyncClient, Client, FailedPrecondition
from tests.support.servers.server import ROOT, ServerProcess

PROGRAM = """
import gevent.monkey
gevent.monkey.patch_all()
import sys
import gevent
from sow_client import NEVER, Client, Unavailable

with Client(sys.argv[1], timeout=5) as client:
    made = [gevent.spawn(client.publish, "t", {"n": n}, key=n, ttl=NEVER) for n in range(20)]
    gevent.joinall(made, raise_error=True)
    subscription = client.subscribe("t")
    with client.publisher("t", ttl=NEVER) as publisher, client.live_view("t") as view, client.lease("5s") as lease:
        publisher.publish({"n": 1}, key="more")
        publisher.flush()
        lease.publish("t", {"n": 1}, key="leased")
        print([next(subscription).key for _ in range(2)], len(list(client.query("t"))), len(view) >= 20)
    subscription.close()
try:
    Client("127.0.0.1:9", connect_timeout=0.2).count("t")
except Unavailable as error:
    print(error.reason)
"""


def test_all_of_a_blocking_client_works_in_greenlets(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Story: a query never ended, whatever its timeout."""
    pytest.importorskip("gevent")
    with ServerProcess(tmp_path_factory.mktemp("gevent")) as server:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, server.address],
            env={"PYTHONPATH": f"{ROOT}:{ROOT}/clients:{ROOT}/proto"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout.splitlines() == ["['more', 'leased'] 22 True", "UNREACHABLE"], done.stderr


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if gevent had replaced threads. Gets a line for each switch of gRPC."""
    said: list[str] = []
    monkey, adapter = ModuleType("gevent.monkey"), ModuleType("grpc.experimental.gevent")
    monkey.is_module_patched = lambda name: name == "threading"  # type: ignore[attr-defined]  # of a fake
    adapter.init_gevent = lambda: said.append("switched")  # type: ignore[attr-defined]  # of a fake
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    monkeypatch.setitem(sys.modules, "grpc.experimental.gevent", adapter)
    return said


def test_grpc_is_switched_to_greenlets_before_a_channel_is_opened(switched: list[str]) -> None:
    Client("127.0.0.1:9", environment={}).close()
    assert switched == ["switched"]


async def open_asynchronous() -> None:
    await AsyncClient("127.0.0.1:9", environment={}).close()


def test_an_asynchronous_client_is_refused_in_greenlets(switched: list[str]) -> None:
    opening = open_asynchronous()
    with pytest.raises(FailedPrecondition) as caught:
        opening.send(None)
    assert caught.value.reason == "GEVENT"
    assert switched == []
