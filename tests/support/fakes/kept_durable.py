"""A server's side of one durable subscription: as a pure model, and as a gRPC service in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import sow_pb2
from sow_client import (
    SowError,
)
from sow_client._durable import sequence_of
from tests.support.fakes.subscriptions import Journal, refusal

SECONDS_MAX = 20.0  # before a hanging test fails; nothing takes as long
NAME = "billing"


class Kept:
    """A server's side of one durable subscription: a position in a journal. Guarded by `changed`."""

    def __init__(self, journal: Journal, at: int = 0) -> None:
        self.journal = journal
        self.at = at
        self.exists = True
        self.sessions = 0
        self.forgotten = False
        """The server was restarted: it knows no attachment."""
        self.gaps: list[sow_pb2.Gap] = []
        self.acknowledged: list[sow_pb2.AcknowledgeRequest] = []
        self.refuses: SowError | None = None
        """The error with which acknowledgements are refused."""
        self.changed = threading.Condition()
        self.answers = threading.Event()
        """While it is not set, acknowledgements wait."""
        self.answers.set()

    def frames(self, request: sow_pb2.SubscribeRequest) -> Iterator[sow_pb2.SubscribeResponse]:
        """The frames of a call: DurableBegin, gaps, everything after the position, Progress."""
        self.sessions += 1
        self.forgotten = False
        removed, self.exists = not self.exists, True
        if removed:
            self.at = self.journal.last
        begin = sow_pb2.DurableBegin(
            bookmark=self.journal.bookmark(self.at),
            created=removed and not request.durable.expected,
            reset=removed and request.durable.expected,
            session=f"s{self.sessions}",
        )
        at, last, gaps = self.at, self.journal.last, self.gaps
        self.gaps = []
        yield sow_pb2.SubscribeResponse(durable_begin=begin)
        for gap in gaps:
            yield sow_pb2.SubscribeResponse(gap=gap)
            at = max(at, sequence_of(gap.upto_bookmark))
        yield self.journal.progress(at)
        yield from self.journal.changes(at, last, request.batch_size or 1_000)

    def acknowledge(self, request: sow_pb2.AcknowledgeRequest) -> sow_pb2.AcknowledgeResponse:
        """One call."""
        with self.changed:
            if request.detach:
                return sow_pb2.AcknowledgeResponse()
            self.acknowledged.append(request)
            self.changed.notify_all()
            if self.refuses is not None:
                raise self.refuses
            if request.session != f"s{self.sessions}":
                raise refusal("DURABLE_TAKEN_OVER")
            if self.forgotten:
                raise refusal("DURABLE_DETACHED")
            self.at = max(self.at, sequence_of(request.bookmark))
            return sow_pb2.AcknowledgeResponse(bookmark=self.journal.bookmark(self.at))


class Durables:
    """Serves `Kept`, to one consumer at a time. The n-th call breaks after as many frames as `cuts` says."""

    def __init__(self, kept: Kept, cuts: Iterable[int] = ()) -> None:
        self.kept = kept
        self.cuts = iter(cuts)
        self.active = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        """The generic handler of a gRPC server."""
        return grpc.method_handlers_generic_handler(
            "sow.v1.SowService",
            {
                "Subscribe": grpc.unary_stream_rpc_method_handler(
                    self.subscribe, sow_pb2.SubscribeRequest.FromString, sow_pb2.SubscribeResponse.SerializeToString
                ),
                "Acknowledge": grpc.unary_unary_rpc_method_handler(
                    self.acknowledge,
                    sow_pb2.AcknowledgeRequest.FromString,
                    sow_pb2.AcknowledgeResponse.SerializeToString,
                ),
            },
        )

    def subscribe(
        self, request: sow_pb2.SubscribeRequest, context: grpc.ServicerContext
    ) -> Iterator[sow_pb2.SubscribeResponse]:
        changed = self.kept.changed
        cut = next(self.cuts, None)
        with changed:
            at, frames = self.kept.journal.last, list(self.kept.frames(request))
            self.active += 1
        context.add_callback(self._wake)
        try:
            while context.is_active():
                for number, frame in enumerate(frames):
                    if number == cut:
                        context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                    yield frame
                with changed:
                    while (last := self.kept.journal.last) == at and context.is_active():
                        changed.wait()
                    frames, at = list(self.kept.journal.changes(at, last)), last
        finally:
            with changed:
                self.active -= 1
                changed.notify_all()

    def acknowledge(
        self, request: sow_pb2.AcknowledgeRequest, context: grpc.ServicerContext
    ) -> sow_pb2.AcknowledgeResponse:
        assert self.kept.answers.wait(SECONDS_MAX)
        try:
            return self.kept.acknowledge(request)
        except SowError as error:
            info = any_pb2.Any()
            info.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain="sow"))
            status = status_pb2.Status(code=grpc.StatusCode.ABORTED.value[0], message=error.message, details=[info])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.abort(grpc.StatusCode.ABORTED, error.message)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for something about the calls."""
        with self.kept.changed:
            assert self.kept.changed.wait_for(condition, SECONDS_MAX), f"waited for {what}"

    def _wake(self) -> None:
        with self.kept.changed:
            self.kept.changed.notify_all()
