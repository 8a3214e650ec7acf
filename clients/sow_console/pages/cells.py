"""Lists over all cells: those that answer are shown, and the page names the others (rule C23)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from sow_client import AsyncClient, SowError, Topic, Unavailable
from sow_console.instances import WAIT_SECONDS
from sow_console.pages.page import View

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Joined(Generic[_Answer]):
    """The answers of cells."""

    answers: Mapping[str, _Answer]
    """Each with the name of its cell; "" where there are none."""
    missing: Mapping[str, str]
    """The cells without an answer, each with the reason."""

    @property
    def has_cells(self) -> bool:
        """True where there are several, so rows name theirs."""
        return len(self.answers) + len(self.missing) > 1


async def joined(view: View, ask: Callable[[AsyncClient], Awaitable[_Answer]]) -> Joined[_Answer]:
    """The answers of all cells of the server's name space, that of its own cell by the server itself. Raises the error
    of the first one if none has answered, and that of the server if it does not say which cells there are."""

    async def asked(client: AsyncClient) -> _Answer:
        servers = client.servers_of("").split(",")
        question = asyncio.ensure_future(ask(view.client.here if view.server in servers else client))
        try:
            return await unless_lost(view, servers, question)
        finally:
            question.cancel()

    home = view.session.home(view.server)
    if home != view.server and view.session.is_lost(home):
        others = dict.fromkeys(view.session.cells(home), f"{home}, which names its servers, does not answer")
        own = view.session.cell(view.server)
        others.pop(own, None)
        return Joined({own: await asked(view.client)}, others)
    told = await view.everywhere.in_each_cell(asked)
    answers = {cell: answer for cell, answer in told.items() if not isinstance(answer, SowError)}
    errors = {cell: answer for cell, answer in told.items() if isinstance(answer, SowError)}
    if not answers:
        raise next(iter(errors.values()))
    return Joined(answers, {cell: error.message for cell, error in errors.items()})


def of_id(view: View, shown: str) -> tuple[AsyncClient, str]:
    """The client for something by its id in a list over all cells, and its id there."""
    cell, slash, number = shown.partition("/")
    if slash and cell != view.session.cell(view.server):
        return view.everywhere, shown
    return view.client.here, number if slash else shown


async def unless_lost(view: View, servers: Sequence[str], asking: asyncio.Future[_Answer]) -> _Answer:
    """The answer. Raises Unavailable as soon as none of these servers answers, so that the rest of the page does not
    wait for it; a page of one server waits."""
    watched = [server for server in servers if server in view.servers]
    while not asking.done() and len(view.servers) > 1 and watched:
        known = await asyncio.gather(*(view.session.instance(server).look() for server in watched))
        if all(one.lost or one.silent for one in known):
            raise Unavailable("it does not answer", reason="UNREACHABLE")
        await asyncio.wait({asking}, timeout=WAIT_SECONDS)
    return await asking


async def topics(view: View, *, with_statistics: bool = False) -> Joined[list[Topic]]:
    """The topics of each cell. Raises as `joined`."""
    return await joined(view, lambda client: client.topics(with_statistics=with_statistics))


async def names(view: View) -> list[str]:
    """The names of the topics of all cells that answer."""
    return [one.name for one in all_of(await topics(view))]


def all_of(found: Joined[list[Topic]]) -> list[Topic]:
    """The topics of all cells, by name."""
    return sorted((topic for listed in found.answers.values() for topic in listed), key=attrgetter("name"))
