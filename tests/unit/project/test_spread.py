"""The spreading of tests over cells (`pytest --cells N`)."""

from __future__ import annotations

import ast
import signal
from pathlib import Path

import pytest

from sow_server.placement import load_placement
from tests.support.servers import spread

INTEGRATION = Path(__file__).parents[2] / "integration"
CONFIG = """
[topics.orders]
key = ["/id"]
dead_letter = "orders-dead"
[views.sums]
source = "orders"
"""


def test_what_is_left_out_is_there_and_has_a_reason() -> None:
    for name, reason in spread.left_out().items():
        file, _, test = name.partition("::")
        tree = ast.parse((INTEGRATION / file).read_text())
        assert reason.endswith((".", ":")), name
        test = test.partition("[")[0]
        assert not test or test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name


def test_the_topics_of_a_server_are_spread_and_those_that_belong_together_are_not(tmp_path: Path) -> None:
    config, file = tmp_path / "sow.toml", tmp_path / "placement.toml"
    config.write_text(CONFIG)
    config.chmod(0o600)
    spread.place(file, config, tmp_path / "data", ["--listen", "127.0.0.1:20000"], 3)
    placement = load_placement(file)
    assert dict(placement.cells) == {f"cell-{number}": (f"127.0.0.1:{19_999 + number}",) for number in (1, 2, 3)}
    names = ["trades", "quotes", "t-1", "t-2", "t-3", "a", "Z_", "a.b:c"]
    assert {name: placement.cell_of(name) for name in names} == {name: spread.cell_of(name, 3) for name in names}
    assert {placement.cell_of(name) for name in names} == {"cell-1", "cell-2", "cell-3"}
    assert {placement.cell_of(name) for name in ("orders", "sums", "orders-dead")} == {"cell-2"}
    for name in [*names, "orders-dead"]:
        assert (spread.address_of(name, file.read_text()),) == placement.cells[placement.cell_of(name)]


def test_a_placement_with_another_content_has_a_higher_version(tmp_path: Path) -> None:
    config, file = tmp_path / "sow.toml", tmp_path / "placement.toml"
    versions = []
    for text in (CONFIG, CONFIG, CONFIG.partition("[views")[0]):
        config.write_text(text)
        config.chmod(0o600)
        spread.place(file, config, tmp_path / "data", ["--listen", "127.0.0.1:20000"], 3)
        versions.append(load_placement(file).version)
    assert versions == [1, 1, 2]


@pytest.mark.parametrize("config", ["[replication]\n", '[placement]\nfile = "a.toml"\n'])
def test_a_server_with_links_or_a_placement_stays_one(config: str) -> None:
    assert spread.is_for_one_server(config)
    assert not spread.is_for_one_server(CONFIG)


class Process:
    """A process that ends with a code when it is told to."""

    pid = 1

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float) -> int:
        raise AssertionError("not called")

    def send_signal(self, number: int) -> None:
        self.code = 0 if number == signal.SIGTERM and self.code is None else self.code

    def kill(self) -> None:
        raise AssertionError("not called")


def test_processes_end_together_and_one_that_fails_stops_the_others() -> None:
    stopped = spread.Together([Process(0), Process(None)])
    assert stopped.poll() is None, "one has stopped, and the other may need a while"
    failed = spread.Together([Process(None), Process(2), Process(None)])
    assert (failed.poll(), failed.poll()) == (None, 2)
