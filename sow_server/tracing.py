"""Traces by OpenTelemetry: spans of calls, commits, deliveries and replication, linked to each other (rule X8).

    call ──link──▶ commit ◀──link── deliver
                     ▲ link
       peer: apply ──┘   ◀──link── commit ◀──link── deliver

    [1]  A call has a span if its caller's trace is sampled, or if the server samples it itself (`sample_every`).
    [2]  A commit has a span if a call with a span, or changes of a peer with a trace, may be in it. Nothing else makes
         one, so without such calls tracing costs a comparison per commit.
    [3]  Spans have names of topics, sequences, and counts, and neither keys, payloads, filters nor credentials.
    [4]  Memory is bounded: `COMMITS_KEPT` commits are remembered, and the exporter drops spans that it cannot send.

This module is imported only where `[tracing]` is configured; `opentelemetry` comes with the extra `otel`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import grpc
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, get_current_span
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sow_peering import TRACES_MAX, MergeCounts
from sow_server.access.audit import Value
from sow_server.access.caller import CallTrace
from sow_server.access.needs import Action, Need
from sow_server.config import TracingConfig
from sow_server.engine.commit.observers import Committed

COMMITS_KEPT: Final = 1_000
"""Commits with spans that deliveries, answers and links can still refer to."""
COMMIT_OPEN_SECONDS: Final = 1.0
"""How long the span of a commit stays open for links of the calls that it answers."""
EXPORT_SECONDS_MAX: Final = 5
_WRITES: Final = frozenset({Action.PUBLISH, Action.DELETE, Action.LOAD})
_FAULTS: Final = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""The codes that count as errors of a server."""
_NOTES: Final = frozenset({"topic", "records", "sequence"})
"""The facts of the audit log that a span has, too."""
_HEADERS: Final = ("traceparent", "tracestate")
_NO_CONTEXT: Final = Context()
_PROPAGATOR: Final = TraceContextTextMapPropagator()

Later = Callable[[float, Callable[[], None]], object]
"""Runs a callable after some seconds, such as `loop.call_later`."""


class _TracedCommit(NamedTuple):
    first: int
    last: int
    span: Span


def exporting(settings: TracingConfig) -> SpanProcessor:
    """Sends spans to the collector of the configuration, in batches, on a thread of its own."""
    exporter: SpanExporter = OTLPSpanExporter(
        endpoint=settings.endpoint,
        insecure=settings.endpoint.startswith("http:"),
        timeout=EXPORT_SECONDS_MAX,
    )
    return BatchSpanProcessor(exporter)


class Tracing:
    """Owns the spans. On the event loop, except `between`."""

    def __init__(
        self,
        settings: TracingConfig,
        processor: SpanProcessor,
        *,
        instance: str,
        version: str,
        last_sequence: int,
        later: Later,
        nanos: Callable[[], int] = time.time_ns,
    ) -> None:
        """`last_sequence`: of the store at its start."""
        self._sample_every = settings.sample_every
        self._calls = 0
        """Calls without a parent."""
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # a span is begun only where it is wanted [1] [2]
            resource=Resource.create(
                {"service.name": "sow", "service.instance.id": instance, "service.version": version}
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sow_server", version)
        self._later = later
        self._nanos = nanos
        self._last = last_sequence
        self._commits: deque[_TracedCommit] = deque(maxlen=COMMITS_KEPT)
        self._writes = 0
        """Open calls with spans that may write."""
        self._applies: dict[Span, None] = {}
        """Spans of changes of peers that are being applied."""

    def close(self) -> None:
        """Sends the remaining spans, for a few seconds at most. Blocks."""
        for commit in self._commits:
            commit.span.end()
        self._provider.shutdown()

    # -- calls --------------------------------------------------------------------------------------------------------

    def began(self, path: str, need: Need, metadata: Iterable[tuple[str, str | bytes]]) -> CallSpan | None:
        """The span of a call that was admitted; None: it has none [1]."""
        carrier = {name: value for name, value in metadata if name in _HEADERS and isinstance(value, str)}
        parent = _NO_CONTEXT
        if "traceparent" in carrier:
            parent = _PROPAGATOR.extract(carrier, _NO_CONTEXT)
        found = get_current_span(parent).get_span_context()
        if not (found.trace_flags.sampled if found.is_valid else self._samples()):
            return None
        service, _, method = path[1:].partition("/")
        span = self._tracer.start_span(
            path[1:],
            parent,
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
            start_time=self._nanos(),
        )
        return CallSpan(self, span, writes=need.action in _WRITES)

    def _samples(self) -> bool:
        """True if this call without a parent is sampled."""
        self._calls += 1
        return self._sample_every > 0 and self._calls % self._sample_every == 0

    def opened(self, *, writes: bool) -> None:
        """A call with a span has begun."""
        self._writes += writes

    def closed(self, *, writes: bool) -> None:
        """It has ended."""
        self._writes -= writes

    # -- commits ------------------------------------------------------------------------------------------------------

    def committed(self, commits: Sequence[Committed], synced: int) -> None:
        """The `engine.commit.observers.Follow` of the store: begins the spans of commits that may have traces [2]."""
        for commit in commits:
            first, self._last = self._last + 1, commit.last_sequence
            if not (self._writes or self._applies):
                continue
            span = self._tracer.start_span(
                "commit",
                _NO_CONTEXT,
                links=[Link(applied.get_span_context()) for applied in self._applies],
                attributes={
                    "sow.first_sequence": first,
                    "sow.last_sequence": commit.last_sequence,
                    "sow.topics": tuple(dict.fromkeys(chunk.topic.name for chunk in commit.chunks)),
                    "sow.changes": sum(len(chunk.payloads) for chunk in commit.chunks),
                },
                start_time=commit.commit_time_micros * 1000,
            )
            ended = max(self._nanos(), commit.commit_time_micros * 1000)
            self._commits.append(_TracedCommit(first, commit.last_sequence, span))
            # It stays open for the links of its calls, whose answers come after this.
            self._later(COMMIT_OPEN_SECONDS, lambda span=span, ended=ended: span.end(ended))  # type: ignore[misc]  # its types are the defaults'

    def _after(self, after: int, upto: int) -> list[_TracedCommit]:
        """The commits with spans that have changes after a sequence and up to another one, the latest first."""
        found = []
        for commit in reversed(self._commits):
            if commit.last <= after:
                break
            if commit.first <= upto:
                found.append(commit)
        return found

    def answered(self, call: Span, sequence: int) -> None:
        """Links a call with the commit that has its sequence, in both directions."""
        for commit in self._after(sequence - 1, sequence):
            # A span that has ended takes no links: an answer that waits for peers may come later than
            # COMMIT_OPEN_SECONDS, and a call may be ended in front of its answer.
            for span, other in ((call, commit.span), (commit.span, call)):
                if span.is_recording():
                    span.add_link(other.get_span_context())

    # -- deliveries ---------------------------------------------------------------------------------------------------

    def delivering(
        self, topic: str, after: int, upto: int, changes: int, call: CallTrace | None
    ) -> Callable[[], None] | None:
        """Begins the span of a message with changes of commits with spans; the result ends it. None: it has none."""
        commits = self._after(after, upto)
        if not commits:
            return None
        span = self._tracer.start_span(
            "deliver",
            set_span_in_context(call.span, _NO_CONTEXT) if isinstance(call, CallSpan) else _NO_CONTEXT,
            kind=SpanKind.PRODUCER,
            links=[Link(commit.span.get_span_context()) for commit in commits],
            attributes={"sow.topic": topic, "sow.last_sequence": upto, "sow.changes": changes},
            start_time=self._nanos(),
        )
        return lambda: span.end(self._nanos())

    # -- replication --------------------------------------------------------------------------------------------------

    def between(self, after: int, upto: int) -> tuple[str, ...]:
        """The traces of commits with spans in a range of the journal, as they travel to a peer. From any thread."""
        commits = list(self._commits)  # copied at once: no other thread runs in between
        found = [commit for commit in commits if commit.last > after and commit.first <= upto]
        return tuple(_traceparent(commit.span.get_span_context()) for commit in found[-TRACES_MAX:])

    def applying(self, source: str, upto: int, traces: Sequence[str]) -> Callable[[MergeCounts | None], None] | None:
        """Begins the span of changes of a peer that have traces; the result ends it, with None after a refusal. None:
        it has none."""
        contexts = [context for text in traces[:TRACES_MAX] if (context := _sampled(text)) is not None]
        if not contexts:
            return None
        span = self._tracer.start_span(
            "apply",
            _NO_CONTEXT,
            kind=SpanKind.CONSUMER,
            links=[Link(context) for context in contexts],
            attributes={"sow.source": source, "sow.source_sequence": upto},
            start_time=self._nanos(),
        )
        self._applies[span] = None

        def applied(counts: MergeCounts | None) -> None:
            del self._applies[span]
            if counts is None:
                span.set_status(Status(StatusCode.ERROR))
            else:
                span.set_attribute("sow.applied", counts.applied)
            span.end(self._nanos())

        return applied


class CallSpan:
    """The span of one call."""

    __slots__ = ("_tracing", "_writes", "span")

    def __init__(self, tracing: Tracing, span: Span, *, writes: bool) -> None:
        self._tracing = tracing
        self._writes = writes
        self.span: Final = span
        tracing.opened(writes=writes)

    def answered(self, sequence: int) -> None:
        """A change of the call has this sequence; 0: it has changed nothing."""
        if sequence:
            self._tracing.answered(self.span, sequence)

    def ended(self, code: str, notes: Mapping[str, Value]) -> None:
        """The call has ended with the gRPC status of this name."""
        self.span.set_attribute("rpc.grpc.status_code", grpc.StatusCode[code].value[0])
        for name in _NOTES & notes.keys():
            self.span.set_attribute(f"sow.{name}", notes[name])
        if code in _FAULTS:
            self.span.set_status(Status(StatusCode.ERROR, code))
        self._tracing.closed(writes=self._writes)
        self.span.end()


def _sampled(traceparent: str) -> SpanContext | None:
    """The context in a header `traceparent`, if it is sampled."""
    parent = _PROPAGATOR.extract({"traceparent": traceparent}, _NO_CONTEXT)
    found = get_current_span(parent).get_span_context()
    return found if found.is_valid and found.trace_flags.sampled else None


def _traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
