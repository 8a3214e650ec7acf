"""The tests of the clients' calls cover the whole contract."""

from __future__ import annotations

from pathlib import Path

from tests.support.fakes.called_server import ADMIN, SOW


def test_every_rpc_of_the_contract_is_called_by_a_test_of_both_clients() -> None:
    folder = Path(__file__).parent
    names = ("writes", "reads", "administration", "inspecting", "instances", "publishers")
    modules = [
        folder.parents[1] / "support" / "fakes" / "called_server.py",
        *(folder / f"test_client_{name}.py" for name in names),
    ]
    text = "".join(module.read_text(encoding="utf-8") for module in modules)
    for service in (SOW, ADMIN):
        for method in service.methods:
            if method.name != "GetPublisher":  # for clients that go on in an epoch; ours begin one
                assert f'"{method.name}"' in text, method.name
