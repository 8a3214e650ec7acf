"""What processes of pytest-xdist send of a test (tests/support/servers/workers)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from tests.support.servers.workers import SLOW_SECONDS, FewMessages

Outcome = Literal["passed", "failed", "skipped"]
When = Literal["setup", "call", "teardown"]


class Interactor:
    """The plugin of pytest-xdist that sends."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def sendevent(self, name: str, **kwargs: object) -> None:
        self.sent.append(name)


def sent_of(when: When, outcome: Outcome, seconds: float = 0.0) -> list[str]:
    """As pytest-xdist does it: a report is made serializable, gets an index, and is sent."""
    interactor = Interactor()
    config = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugins=lambda: [object(), interactor]))
    few = FewMessages(cast(Any, config))
    report = pytest.TestReport("a", ("a", 1, "a"), {}, outcome, None, when, duration=seconds)
    data: dict[str, object] = few.pytest_report_to_serializable(report) or {"report": 1}
    data["item_index"] = 0
    interactor.sendevent("logstart", nodeid="a", location=("a", 1, "a"))
    interactor.sendevent("testreport", data=data)
    interactor.sendevent("logfinish", nodeid="a", location=("a", 1, "a"))
    interactor.sendevent("runtest_protocol_complete", item_index=0, duration=seconds)
    return interactor.sent


@pytest.mark.parametrize("when", ["setup", "teardown"])
def test_a_setup_or_teardown_is_sent_if_it_did_not_pass_or_was_slow(when: When) -> None:
    assert sent_of(when, "passed") == ["runtest_protocol_complete"]
    assert sent_of(when, "passed", SLOW_SECONDS) == ["testreport", "runtest_protocol_complete"]
    assert sent_of(when, "failed") == sent_of(when, "skipped") == ["testreport", "runtest_protocol_complete"]


@pytest.mark.parametrize("outcome", ["passed", "failed", "skipped"])
def test_each_outcome_is_sent(outcome: Outcome) -> None:
    assert sent_of("call", outcome) == ["testreport", "runtest_protocol_complete"]
