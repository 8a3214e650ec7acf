"""The part of `sow.v1.SowService` for subscriptions: to changes, as the consumer of a durable, and to live results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from sow.v1 import sow_pb2
from sow_server.access.caller import Call
from sow_server.access.needs import Action
from sow_server.engine.doors import Reads
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.policies import NOTHING
from sow_server.services.followers import Subscribing
from sow_server.services.live_queries import LiveQueries, asked_aggregates
from sow_server.services.ownership import OwnedDurables
from sow_server.services.wire import result_convert, subscribe_convert
from sow_server.subscriptions.durable.consumer import Attachment, Consumer
from sow_server.subscriptions.frames import ChangeFrame, Frame
from sow_server.subscriptions.request import PROGRESS_MICROS, Request
from sow_server.subscriptions.results.fed import Asked
from sow_server.subscriptions.results.follower import LiveResult
from sow_server.subscriptions.stream import stream
from sow_server.subscriptions.subscription import Subscription, leave


class SubscribeService:
    """Validates, subscribes, translates; owns nothing."""

    def __init__(self, reading: Reads, subscribing: Subscribing, readers: Executor, runs: LiveQueries) -> None:
        self._reading = reading
        self._hub = subscribing.hub
        self._consumers = subscribing.consumers
        self._followers = subscribing.followers
        self._results = subscribing.results
        self._deliveries = subscribing.deliveries
        self._readers = readers
        self._runs = runs
        self._owned = OwnedDurables(reading.durables)

    async def Subscribe(self, request: sow_pb2.SubscribeRequest, call: Call) -> AsyncGenerator[bytes, None]:
        """Messages as bytes on the wire: a message for many subscribers is encoded once."""
        attachment = subscribe_convert.attachment(request)
        action = Action.READ if attachment is None else Action.CONSUME
        result = result_convert.is_asked(request)
        if result:
            result_convert.check_result(request)
        figures = not request.topic or call.topic(request.topic, action).restriction.rows is None
        with call.holding("subscriptions"):
            source: Subscription | Consumer | LiveResult
            if result:
                source = await self._follow(request, call)
            else:
                asked = await self._asked(request, call, action)
                source = (
                    self._hub.subscribe(asked) if attachment is None else await self._attach(call, asked, attachment)
                )
            if isinstance(source, Subscription):
                call.leaves = partial(leave, source)
            async with aclosing(stream(source, self._readers)) as frames:
                with self._followers.following(call, request, source):
                    try:
                        async for frame in frames:
                            delivered = self._delivering(frame, call)
                            try:
                                yield subscribe_convert.response(frame, self._reading, figures=figures)
                            finally:  # also where the subscriber leaves just now
                                if delivered is not None:
                                    delivered()
                    except StoreError as error:
                        if not request.tell_left or (left := subscribe_convert.left(error)) is None:
                            raise
                        yield left

    async def _asked(self, request: sow_pb2.SubscribeRequest, call: Call, action: Action) -> Request:
        convert_request = partial(
            subscribe_convert.request,
            request,
            self._reading,
            lambda topic: call.part_of(topic, action) if topic.complete else None,  # a view joins later (rule V6)
            rights=call.rights(action) if request.topic_pattern else "",
        )
        # Checking many held ranges, or values of parameters, takes milliseconds.
        loop = asyncio.get_running_loop()
        held = request.HasField("held") or bool(request.parameters)
        asked = await loop.run_in_executor(self._readers, convert_request) if held else convert_request()
        if request.filter or request.parameters or not call.unrestricted:
            # Parsing and compiling may take milliseconds.
            await loop.run_in_executor(self._readers, self._hub.prepare, asked)
        return asked

    async def _follow(self, request: sow_pb2.SubscribeRequest, call: Call) -> LiveResult:
        """A follower of a live result (rule S10)."""
        granted = call.topic(request.topic)
        run = asyncio.get_running_loop().run_in_executor
        asked: Asked
        if result_convert.groups(request):
            asked = await run(self._readers, asked_aggregates, request, self._reading, granted, self._runs)
        else:
            sorts = self._runs.sorts
            asked = await run(self._readers, result_convert.asked_list, request, self._reading, granted, sorts)
        progress = request.progress_micros or PROGRESS_MICROS
        return self._results.follow(asked, progress_micros=progress, batch_size=request.batch_size or 1000)

    def _delivering(self, frame: Frame, call: Call) -> Callable[[], None] | None:
        """Begins the trace of a message; the result ends it."""
        if self._deliveries is None or not isinstance(frame, ChangeFrame):
            return None
        return self._deliveries.delivering(frame.topic, frame.after, frame.bookmark, len(frame.rows), call.trace)

    async def _attach(self, call: Call, asked: Request, attachment: Attachment) -> Consumer:
        declared = attachment.declared or NOTHING
        with self._owned.making(call, asked.topic, attachment.name, "durable.name", declared) as name:
            return await self._attach_as(name, asked, attachment)

    async def _attach_as(self, name: str, asked: Request, attachment: Attachment) -> Consumer:
        attachment = replace(attachment, name=name)
        attached = self._consumers.attach(asked, attachment)
        try:
            return await attached
        except asyncio.CancelledError:
            attached.then(_close)  # the caller has gone
            raise


def _close(attached: Consumer | StoreError) -> None:
    if isinstance(attached, Consumer):
        attached.close()
