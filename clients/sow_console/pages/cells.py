"""Lists over all cells: those that answer are shown, and the page names the others (rule C23)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from sow_client import AsyncClient, InvalidArgument, SowError, Topic, Unavailable
from sow_console.instances import WAIT_SECONDS
from sow_console.pages.page import View

_Answer = TypeVar("_Answer")
NO_ANSWER = "it does not answer"


@dataclass(frozen=True, slots=True)
class Joined(Generic[_Answer]):
    """The answers of cells."""

    answers: Mapping[str, _Answer]
    """By the names of the cells; "" where there are none."""
    missing: Mapping[str, str]
    """The cells without an answer, each with the reason."""

    @property
    def has_cells(self) -> bool:
        """True where there are several, so rows name theirs."""
        return len(self.answers) + len(self.missing) > 1


async def joined(view: View, ask: Callable[[AsyncClient], Awaitable[_Answer]]) -> Joined[_Answer]:
    """The answers of all cells of the server's name space. Raises the error of the first one if none has answered, and
    Unavailable if the server does not say which cells there are."""
    asking = {cell: asyncio.ensure_future(ask(client)) for cell, client in (await _cells(view)).items()}
    answers: dict[str, _Answer] = {}
    errors: dict[str, SowError] = {}
    try:
        for cell, question in asking.items():
            try:
                servers = view.session.servers_of(cell, view.server) if len(asking) > 1 else []
                answers[cell] = await unless_lost(view, servers or [view.server], question)
            except SowError as error:
                errors[cell] = error
    finally:
        for question in asking.values():
            question.cancel()
    if not answers:
        raise next(iter(errors.values()))
    return Joined(answers, {cell: error.message for cell, error in errors.items()})


async def _cells(view: View) -> Mapping[str, AsyncClient]:
    if len(view.session.cells(view.server)) < 2:  # else each look at a page would ask for them
        return {"": view.client}
    try:
        return await view.client.cells()
    except InvalidArgument as error:  # to one of them a token does not go
        raise Unavailable(error.message, reason="UNREACHABLE") from error


async def unless_lost(view: View, servers: list[str], asking: asyncio.Future[_Answer]) -> _Answer:
    """The answer. Raises Unavailable as soon as none of these servers answers, so that the rest of the page does not
    wait for it; a page of one server waits."""
    while not asking.done() and len(view.servers) > 1:
        known = await asyncio.gather(*(view.session.instance(server).look() for server in servers))
        if all(one.lost or one.silent for one in known):
            raise Unavailable(NO_ANSWER, reason="UNREACHABLE")
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
