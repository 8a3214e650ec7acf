"""The services on a `Rig`, called with identities: an in-process server under a clock that the test owns.

parts = GuardedParts(rig, identity("desk", "desk") + grant("desk", "orders", "read", "rows = \\"/region = 'eu'\\""))
parts.ask("desk", "Query", topic="orders")       # the responses as messages; a refusal as the status that ends the call

Nothing happens between two calls: during a call, the test's own thread does the writer's and the readers' work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Any, Final, TypeVar, cast

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2

from sow.v1 import admin_pb2, load_pb2, snapshot_pb2, sow_pb2
from sow_server.access.audit import AuditLog, Part, Value
from sow_server.access.authorizer import Authorizer
from sow_server.access.caller import Call
from sow_server.access.credentials import Shown, Tokens
from sow_server.access.file import load_access
from sow_server.access.model import AccessFile
from sow_server.access.needs import Action, need_of
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import Durability
from sow_server.query.exports import Exports
from sow_server.query.sort_memory import SortMemory
from sow_server.services.admin_service import AdminService
from sow_server.services.changes_service import ChangesService
from sow_server.services.door.guard import Handler, handler_of
from sow_server.services.door.statuses import status
from sow_server.services.durables_service import DurablesService
from sow_server.services.exporting import ServedExport
from sow_server.services.figure_history import FigureHistory
from sow_server.services.followers import Followers, Subscribing
from sow_server.services.health_service import HealthService
from sow_server.services.inspection_service import InspectionService, ThisServer
from sow_server.services.links_service import LinksService
from sow_server.services.live_queries import LiveQueries
from sow_server.services.load_jobs import LoadJobs
from sow_server.services.load_service import LoadService
from sow_server.services.placement_service import PlacementService
from sow_server.services.reader_pieces import ReaderPieces
from sow_server.services.records.admission import Admission
from sow_server.services.records.positions import Positions
from sow_server.services.records.queries import Queries
from sow_server.services.records.submissions import Submissions
from sow_server.services.replication import Links
from sow_server.services.snapshot_service import SnapshotService
from sow_server.services.sow_service import PublishOptions, SowService
from sow_server.services.subscribe_service import SubscribeService
from sow_server.services.wire import result_convert, subscribe_convert
from sow_server.subscriptions.durable.consumer import Consumer
from sow_server.subscriptions.results.live_results import RESULT_BYTES_MAX
from tests.support.oracles.access import write_access
from tests.support.stores.parts import no_reader_processes, reading_of
from tests.support.stores.stores import Rig
from tests.support.stores.subscribers import DurableFollower, Follower, Subscribers

T = TypeVar("T")

SERVICES: Final = tuple(
    module.DESCRIPTOR.services_by_name[name]
    for module, name in (
        (sow_pb2, "SowService"),
        (admin_pb2, "AdminService"),
        (snapshot_pb2, "SnapshotService"),
        (load_pb2, "LoadService"),
    )
)
METHODS: Final[dict[str, MethodDescriptor]] = {
    method.name: method for service in SERVICES for method in service.methods
}
"""All methods of these services, by name."""
FRAMES_MAX: Final = 50
"""Frames that `ask` takes of a subscription."""


class GuardedParts:
    """Owns the services, and the event loop that they run on."""

    def __init__(self, rig: Rig, access: str | AccessFile) -> None:
        """`access`: the access file, or its text without root, which is added."""
        self.rig = rig
        self.subscribers = Subscribers(rig)
        self.audit = _KeptAudit()
        self.healthy = HealthService()
        self._loop = asyncio.new_event_loop()
        self._readers = _InThisThread()
        self.authorizer = Authorizer(
            rig.store.topics,
            self._read(access),
            self.audit,
            _NoObserver(),
            now_micros=lambda: rig.time.wall_micros,
            elapsed=lambda: rig.time.elapsed_micros / 1e6,
        )
        self.sow, self.subscribe, parts = self._loop.run_until_complete(self._built())
        self.handlers: dict[str, Handler] = {
            method: handler_of(parts[described.containing_service.name], method)
            for method, described in METHODS.items()
        }
        """The answer to each method."""

    def replace_access(self, access: str | AccessFile) -> None:
        """Reloads the access file."""
        self.authorizer.replace(self._read(access))

    def _read(self, access: str | AccessFile) -> AccessFile:
        if isinstance(access, AccessFile):
            return access
        folder = self.rig.path.parent
        write_access(folder, access)
        return load_access(folder / "auth.toml")

    async def _built(self) -> tuple[SowService, SubscribeService, dict[str, tuple[object, ...]]]:
        """The services of records and of subscriptions, and the parts of each service."""
        store, clock, hub, consumers = self.rig.store, self.rig.clock, self.subscribers.hub, self.subscribers.consumers
        readers = self._readers
        links = cast(Links, _NoLinks())
        reading = reading_of(store)
        changes = Submissions(store.reads, store.writes, links)
        processes = no_reader_processes(store, self.rig.path.parent / "none")
        followers = Followers(clock.now_micros)
        queries = Queries(reading, readers, SortMemory(), processes)
        subscribing = Subscribing(hub, consumers, followers, self.subscribers.results)
        sow = SowService(
            reading,
            store.writes,
            subscribing,
            changes,
            readers,
            queries,
            Positions(store.reads, store.writes, patience_seconds=0),
            PublishOptions(Durability.FSYNC),
        )
        self.figures = FigureHistory(store.reads, store.writes, followers, links, readers)
        server = ThisServer("here", "0", self.healthy, self.figures)
        admin = (
            AdminService(reading, store.writes, changes, readers),
            DurablesService(reading, store.writes, consumers, followers, readers),
            InspectionService(reading, store.writes, followers, readers, server),
            PlacementService(reading, None, readers),
            LinksService(links),
        )
        elapsed = lambda: self.rig.time.elapsed_micros  # noqa: E731  # a clock
        exports: Exports[ServedExport] = Exports(store.reads, elapsed=elapsed)
        pieces = ReaderPieces(readers)
        snapshot = (
            SnapshotService(reading, store.writes, exports, readers, processes, pieces),
            ChangesService(reading, store.writes, hub, consumers, pieces),
        )
        admission = Admission(store.reads, store.writes)
        loading = LoadJobs(store.reads, store.writes, admission, readers)
        loads = LoadService(store.writes, loading, readers, store.limits, dynamic_topics=False)
        subscribe = SubscribeService(
            reading, subscribing, readers, LiveQueries(queries, SortMemory(), RESULT_BYTES_MAX)
        )
        parts: dict[str, tuple[object, ...]] = {
            "SowService": (sow, subscribe),
            "AdminService": admin,
            "SnapshotService": snapshot,
            "LoadService": (loads,),
        }
        return sow, subscribe, parts

    def __enter__(self) -> GuardedParts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.close()

    # -- calls --------------------------------------------------------------------------------------------------------

    def ask(self, identity: str, method: str, request: Message | None = None, **fields: Any) -> list[Message]:
        """Everything that a caller gets: the responses, and a status if the call ends with one. Of a subscription it
        takes what there is at once."""
        return self.ask_all(identity, method, [request_of(method, **fields) if request is None else request])

    def ask_all(self, identity: str, method: str, requests: Sequence[Message]) -> list[Message]:
        """As `ask`, with the requests of one call."""
        responses, error = self._run(self._called(identity, method, requests))
        return responses if error is None else [*responses, error]

    def status(self, identity: str, method: str, **fields: Any) -> status_pb2.Status:
        """The status that a refused call ends with."""
        last = self.ask(identity, method, **fields)[-1]
        assert isinstance(last, status_pb2.Status), last
        return last

    def answers(self, identity: str, method: str, request: Message | None = None, **fields: Any) -> list[Any]:
        """The responses of a call that is not refused."""
        found = self.ask(identity, method, request, **fields)
        assert not any(isinstance(response, status_pb2.Status) for response in found), found[-1]
        return found

    def call(self, identity: str, method: str) -> Call:
        """An admitted call. Raises StoreError."""
        path = f"/{METHODS[method].containing_service.full_name}/{method}"
        prover, shown = Tokens(), Shown(token=identity)
        made, session = self.authorizer.admit(prover, path, need_of(path), shown, "test:1", lambda: None)
        self.authorizer.finished(made, session, "OK")
        return made

    def sample_figures(self) -> None:
        """What the periodic job does."""
        self._run(self.figures.sample())

    def follow(self, identity: str, request: sow_pb2.SubscribeRequest) -> Follower:
        """A subscription as the service makes it, which the test drives. Raises StoreError."""
        call = self.call(identity, "Subscribe")
        if result_convert.is_asked(request):
            result_convert.check_result(request)
            listed = result_convert.asked_list(request, reading_of(self.rig.store), call.topic(request.topic))
            return self.subscribers.follow(listed)
        asked = subscribe_convert.request(request, reading_of(self.rig.store), call.part_of)
        if request.topic:
            call.topic(request.topic)
        return Follower(self.subscribers, asked)

    def consume(self, identity: str, request: sow_pb2.SubscribeRequest) -> DurableFollower:
        """A consumer of a durable as the service makes it, which the test drives. Raises StoreError."""
        return DurableFollower(self.subscribers, self._run(self._attached(identity, request)))

    async def _attached(self, identity: str, request: sow_pb2.SubscribeRequest) -> Consumer:
        call = self.call(identity, "Subscribe")
        attachment = subscribe_convert.attachment(request)
        assert attachment is not None, "the request names a durable"
        call.topic(request.topic, Action.CONSUME)
        asked = subscribe_convert.request(
            request, reading_of(self.rig.store), lambda topic: call.part_of(topic, Action.CONSUME)
        )
        return await self.subscribe._attach(call, asked, attachment)

    async def _called(
        self, identity: str, method: str, requests: Sequence[Message]
    ) -> tuple[list[Message], status_pb2.Status | None]:
        responses: list[Message] = []
        described = METHODS[method]
        handler = self.handlers[method]
        kind = GetMessageClass(described.output_type)
        given: object = _stream(requests) if described.client_streaming else requests[0]
        try:
            call = self.call(identity, method)
            if not described.server_streaming:
                responses.append(_kept(await handler(given, call), kind))
                return responses, None
            answered = handler(given, call)
            try:
                if method == "Subscribe":
                    await self._taken(answered, responses)
                else:
                    async for response in answered:  # answers before an error count, so no comprehension
                        responses += [_kept(response, kind)]
            finally:
                await answered.aclose()
        except StoreError as error:
            return responses, status(error)
        return responses, None

    async def _taken(self, answered: Any, responses: list[Message]) -> None:
        """Takes the frames of a subscription until it waits."""
        while len(responses) < FRAMES_MAX:
            following = asyncio.ensure_future(answered.__anext__())
            for _ in range(20):  # turns of the loop: present changes come within a few
                self.subscribers.settle()
                await asyncio.sleep(0)
                if following.done():
                    break
            else:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                return
            responses.append(sow_pb2.SubscribeResponse.FromString(following.result()))

    def _run(self, call: Any) -> Any:
        async def driven() -> Any:
            task = asyncio.ensure_future(call)
            while not task.done():
                self.subscribers.settle()
                await asyncio.sleep(0)
            return task.result()

        return self._loop.run_until_complete(driven())


def request_of(method: str, **fields: object) -> Message:
    """The request of a method."""
    return GetMessageClass(METHODS[method].input_type)(**fields)


async def _stream(requests: Sequence[Message]) -> AsyncIterator[Message]:
    for request in requests:
        yield request


def _kept(response: Message | bytes, kind: type[Message]) -> Message:
    """A copy of a response: a handler may go on with a message that it has sent."""
    return kind.FromString(response if isinstance(response, bytes) else response.SerializeToString())


class _InThisThread(Executor):
    """Runs everything at once."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # as an executor does
            done.set_exception(error)
        return done


class _NoObserver:
    def authentication_failed(self) -> None: ...

    def access_denied(self, method: str, action: str) -> None: ...


class _KeptAudit(AuditLog):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Value]] = []
        self.lines_total = self.failures_total = 0

    def write(self, part: Part, event: str, fields: Any, *, reserved: bool = False) -> bool:
        self.lines.append({"event": event, **fields})
        return True

    def catch_up(self) -> None: ...

    def close(self) -> None: ...


class _NoLinks:
    """An instance without links."""

    def sync_peers(self, topic: str) -> int:
        return 0

    async def replicated(self, topic: str, sequence: int) -> None: ...

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        return admin_pb2.GetReplicationStatusResponse()
