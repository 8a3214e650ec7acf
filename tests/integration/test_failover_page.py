"""The examples of docs/failover.md, run as they stand with two linked instances that are killed where they say so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.support.servers.cluster import Cluster
from tests.support.servers.server import ROOT, ServerProcess, until

PAGE: Final = (ROOT / "docs" / "failover.md").read_text(encoding="utf-8")
EXAMPLES: Final[list[str]] = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
HAPPENS: Final = re.compile(r"# (ldn|par) (is killed|stops in order|is back)$", re.MULTILINE)
TOPICS: Final = '[topics.orders]\nkey = ["/id"]\nexpiration = "enabled"\n'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("page")
    with Cluster(folder, "ldn", "par", topics=TOPICS, mode="sync") as made:
        yield made
        assert made.faults() == []


def events(cluster: Cluster) -> dict[str, Callable[[str], None]]:
    """What may happen in an example. Everything has arrived everywhere when an instance is lost."""

    def killed(name: str) -> None:
        if not cluster[name].server.alive:
            return  # a change came again in a loop: the links of a dead instance never stream
        cluster.await_streaming()
        cluster[name].server.kill9()

    def stops(name: str) -> None:
        cluster.await_streaming()
        assert cluster[name].server.terminate() == 0

    def back(name: str) -> None:
        cluster.start(name)
        cluster.await_streaming()

    return {"is killed": killed, "stops in order": stops, "is back": back}


def test_there_is_an_example_of_each_promise() -> None:
    """Each section that promises something has one, and something is lost in each but that of reads."""
    sections = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)
    lost = {section.splitlines()[0]: bool(HAPPENS.search(section)) for section in sections if "```python" in section}
    assert lost == {
        "# Continuing at another instance": True,
        "What happens to each call": True,
        "Bookmarks": True,
        "Read your writes": False,
        "Live views": True,
        "Publishers": True,
        "Durables": True,
    }


def tells_elsewhere(server: ServerProcess) -> bool:
    """Whether bookmarks of an instance tell positions of the other one: a moment after its links have begun."""
    with server.client() as client, client.sow_and_subscribe("orders") as changes:
        for change in changes:
            if change.op == "snapshot_end":
                return ";" in str(changes.bookmark)
    return False


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_does_what_the_page_says(cluster: Cluster, example: str) -> None:
    cluster.await_streaming()
    for name in ("ldn", "par"):
        until(partial(tells_elsewhere, cluster[name].server), 20, "bookmarks that mean something elsewhere")
    for name in ("ldn", "par"):
        example = example.replace(f"{name}:7450", cluster[name].server.address)
    code = HAPPENS.sub(r'happens("\1", "\2")', example)
    known = events(cluster)
    try:
        exec(compile(code, "docs/failover.md", "exec"), {"happens": lambda name, what: known[what](name)})
    finally:
        for name, instance in cluster.instances.items():
            if not instance.server.alive:
                cluster.start(name)
