"""Spans of calls, commits, deliveries and replication, and the links between them (rule X8, tracing [1] to [4])."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from sow_peering import TRACES_MAX, MergeCounts
from sow_server.access.needs import need_of
from sow_server.config import TracingConfig
from sow_server.engine.commit.observers import Committed
from sow_server.tracing import COMMITS_KEPT, CallSpan, Tracing

PUBLISH: Final = "/sow.v1.SowService/Publish"
QUERY: Final = "/sow.v1.SowService/Query"
TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
SAMPLED: Final = [("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")]
NOT_SAMPLED: Final = [("traceparent", f"00-{TRACE}-b7ad6b7169203331-00")]


class Traced:
    """Tracing whose spans are in memory, and whose timers a test runs."""

    def __init__(self, *, sample_every: int = 0, last_sequence: int = 0, instance: str = "nyc-1") -> None:
        self._exporter = InMemorySpanExporter()
        self._timers: list[Callable[[], None]] = []
        self.tracing = Tracing(
            TracingConfig("http://collector:4317", sample_every),
            SimpleSpanProcessor(self._exporter),
            instance=instance,
            version="1.2.3",
            last_sequence=last_sequence,
            later=lambda _seconds, run: self._timers.append(run),
        )

    def began(self, path: str = PUBLISH, metadata: Sequence[tuple[str, str | bytes]] | None = None) -> CallSpan | None:
        return self.tracing.began(path, need_of(path), SAMPLED if metadata is None else metadata)

    def call(self, path: str = PUBLISH) -> CallSpan:
        found = self.began(path)
        assert found is not None
        return found

    def committed(self, *last_sequences: int) -> None:
        self.tracing.committed([Committed(last, 1_000_000, ()) for last in last_sequences], last_sequences[-1])

    def spans(self, name: str) -> list[ReadableSpan]:
        """The ended spans of a name."""
        for run in self._timers:
            run()
        self._timers.clear()
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        (found,) = self.spans(name)
        return found


def links(span: ReadableSpan) -> list[int]:
    """The ids of the spans that a span has links to."""
    return [link.context.span_id for link in span.links]


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    found: int = span.context.span_id
    return found


# --- calls -----------------------------------------------------------------------------------------------------------


def test_a_call_of_a_sampled_trace_is_a_child_of_the_callers_span() -> None:
    traced = Traced()
    traced.call().ended("OK", {"topic": "orders", "records": 2, "ended_identity": "desk"})

    span = traced.span("sow.v1.SowService/Publish")
    assert span.kind is SpanKind.SERVER
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert dict(span.attributes or {}) == {
        "rpc.system": "grpc",
        "rpc.service": "sow.v1.SowService",
        "rpc.method": "Publish",
        "rpc.grpc.status_code": 0,
        "sow.topic": "orders",
        "sow.records": 2,
    }
    assert dict(span.resource.attributes)["service.instance.id"] == "nyc-1"


@pytest.mark.parametrize(
    "metadata",
    [[], NOT_SAMPLED, [("traceparent", "nonsense")], [("traceparent", b"\xff")]],
    ids=["none", "not sampled", "nonsense", "bytes"],
)
def test_another_call_has_no_span(metadata: list[tuple[str, str | bytes]]) -> None:
    assert Traced().began(metadata=metadata) is None


def test_one_of_so_many_calls_without_a_trace_is_sampled() -> None:
    traced = Traced(sample_every=3)
    assert [traced.began(metadata=[]) is not None for _ in range(6)] == [False, False, True, False, False, True]
    assert all(traced.began(metadata=NOT_SAMPLED) is None for _ in range(6)), "its caller has decided"


@pytest.mark.parametrize(("code", "is_error"), [("NOT_FOUND", False), ("INTERNAL", True), ("UNAVAILABLE", True)])
def test_only_faults_of_the_server_are_errors(code: str, is_error: bool) -> None:
    traced = Traced()
    traced.call().ended(code, {})
    assert (traced.span("sow.v1.SowService/Publish").status.status_code is StatusCode.ERROR) == is_error


# --- commits and deliveries ------------------------------------------------------------------------------------------


def test_a_publish_and_its_commit_have_links_to_each_other() -> None:
    traced = Traced(last_sequence=10)
    first, second = traced.call(), traced.call()
    traced.committed(12, 14)
    first.answered(14)
    second.answered(11)
    for call in (first, second):
        call.ended("OK", {})

    earlier, later = traced.spans("commit")
    publishes = traced.spans("sow.v1.SowService/Publish")
    assert [(links(span), links(commit)) for span, commit in zip(publishes, (later, earlier), strict=True)] == [
        ([id_of(later)], [id_of(publishes[0])]),
        ([id_of(earlier)], [id_of(publishes[1])]),
    ]
    assert dict(earlier.attributes or {}) == {
        "sow.first_sequence": 11,
        "sow.last_sequence": 12,
        "sow.topics": (),
        "sow.changes": 0,
    }
    assert earlier.start_time == 1_000_000_000, "the time of the commit"


def test_an_answer_that_comes_when_a_span_has_ended_gives_it_no_link(caplog: pytest.LogCaptureFixture) -> None:
    """An answer that waits for peers comes later than a second after its commit, and each one logged a warning of
    OpenTelemetry. A call that was ended, as its credential has expired, is answered too."""
    traced = Traced(last_sequence=10)
    late, ended = traced.call(), traced.call()
    traced.committed(11)
    ended.ended("UNAUTHENTICATED", {})
    ended.answered(11)
    commit = traced.span("commit")  # its second is over
    late.answered(11)
    late.ended("OK", {})

    first, second = traced.spans("sow.v1.SowService/Publish")
    assert (links(first), links(second)) == ([], [id_of(commit)])
    assert links(commit) == [id_of(first)]
    assert caplog.messages == []


def test_a_commit_without_a_traced_write_has_no_span() -> None:
    """tracing [2]."""
    traced = Traced()
    traced.committed(1)
    query = traced.call(QUERY)
    traced.committed(2)
    publish = traced.call()
    publish.ended("OK", {})
    traced.committed(3)
    query.ended("OK", {})
    assert traced.spans("commit") == []


def test_a_message_to_a_subscriber_has_links_to_its_commits() -> None:
    traced = Traced()
    traced.call()
    subscribe = traced.call("/sow.v1.SowService/Subscribe")
    traced.committed(2, 4, 6)
    delivered = traced.tracing.delivering("orders", 2, 5, 3, subscribe)
    assert delivered is not None
    delivered()

    span = traced.span("deliver")
    commits = traced.spans("commit")
    assert sorted(links(span)) == sorted([id_of(commits[1]), id_of(commits[2])])
    assert span.parent is not None
    assert span.parent.span_id == subscribe.span.get_span_context().span_id
    assert traced.tracing.delivering("orders", 6, 9, 1, None) is None, "no commit of these has a span"


def test_old_commits_are_forgotten() -> None:
    """tracing [4]."""
    traced = Traced()
    traced.call()
    traced.committed(*range(1, COMMITS_KEPT + 2))
    assert traced.tracing.delivering("orders", 0, 1, 1, None) is None
    assert traced.tracing.delivering("orders", 1, 2, 1, None) is not None


# --- replication -----------------------------------------------------------------------------------------------------


def test_a_trace_goes_on_at_a_peer() -> None:
    here, there = Traced(instance="nyc-1"), Traced(instance="ldn-1", last_sequence=40)
    here.call()
    here.committed(2, 4)
    traces = here.tracing.between(0, 4)
    applied = there.tracing.applying("nyc-1", 4, traces)
    assert applied is not None
    there.committed(44)
    applied(MergeCounts(applied=4))

    apply, commit = there.span("apply"), there.span("commit")
    assert links(apply) == [id_of(span) for span in here.spans("commit")]
    assert links(commit) == [id_of(apply)]
    assert dict(apply.attributes or {}) == {"sow.source": "nyc-1", "sow.source_sequence": 4, "sow.applied": 4}
    there.committed(45)
    assert len(there.spans("commit")) == 1, "nothing traced is being applied any more"


def test_changes_without_a_readable_trace_have_no_span() -> None:
    tracing = Traced().tracing
    assert tracing.applying("nyc-1", 4, ["", "nonsense", NOT_SAMPLED[0][1]]) is None


def test_no_more_traces_travel_than_are_taken() -> None:
    traced = Traced()
    traced.call()
    traced.committed(*range(1, 2 * TRACES_MAX))
    assert len(traced.tracing.between(0, 2 * TRACES_MAX)) == TRACES_MAX
    assert traced.tracing.between(5, 7) == traced.tracing.between(0, 7)[5:]


def test_a_refusal_is_an_error() -> None:
    traced = Traced()
    applied = traced.tracing.applying("nyc-1", 4, [SAMPLED[0][1]])
    assert applied is not None
    applied(None)
    assert traced.span("apply").status.status_code is StatusCode.ERROR
