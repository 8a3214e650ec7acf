"""Writes that a person may ask for where the console was started with `--allow-writes`.

Each is a call as that person, so the server permits, refuses and audits it as ever. The page first asks, and shows the
command that does the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from sow_client import EARLIEST, AsyncClient

Fields: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Write:
    """One kind of write."""

    name: str
    title: str
    fields: tuple[str, ...]
    """The arguments; all must be given."""
    do: Callable[[AsyncClient, Fields], Awaitable[str]]
    """Does it, and says what was done. Raises SowError."""
    words: Callable[[Fields], list[str]]
    """The command that does the same."""
    back: Callable[[Fields], tuple[str, dict[str, str]]]
    """The page to go back to, and its arguments."""


async def _touch(client: AsyncClient, given: Fields) -> str:
    done = await client.touch(given["topic"], given["key"], ttl=given["ttl"])
    return "It expires at " + done.expire_time.isoformat() if done.expire_time else "It never expires."


async def _persist(client: AsyncClient, given: Fields) -> str:
    await client.persist(given["topic"], given["key"])
    return "It never expires."


async def _delete(client: AsyncClient, given: Fields) -> str:
    done = await client.sow_delete(given["topic"], keys=[given["key"]])
    return "The record is deleted." if done.deleted else "There was no live record of this key."


async def _clear(client: AsyncClient, given: Fields) -> str:
    await client.clear_backlog(given["topic"], given["durable"])
    return "Its whole backlog counts as acknowledged."


async def _rewind(client: AsyncClient, given: Fields) -> str:
    done = await client.rewind(given["topic"], given["durable"], EARLIEST)
    return f"{done.unacknowledged_entries:,} changes are to be consumed again."


async def _end(client: AsyncClient, given: Fields) -> str:
    await client.end_subscription(given["id"])
    return "It ends. Its client may subscribe again."


def _to_key(given: Fields) -> tuple[str, dict[str, str]]:
    return "key", {"topic": given["topic"], "key": given["key"]}


def _to_durables(given: Fields) -> tuple[str, dict[str, str]]:
    return "durables", {"topic": given["topic"]}


WRITES: Final[Mapping[str, Write]] = {
    one.name: one
    for one in (
        Write(
            "touch",
            "Give a record another lifetime",
            ("topic", "key", "ttl"),
            _touch,
            lambda given: ["touch", given["topic"], given["key"], "--ttl", given["ttl"]],
            _to_key,
        ),
        Write(
            "persist",
            "Take a record's lifetime away",
            ("topic", "key"),
            _persist,
            lambda given: ["persist", given["topic"], given["key"]],
            _to_key,
        ),
        Write(
            "delete",
            "Delete a record",
            ("topic", "key"),
            _delete,
            lambda given: ["delete", given["topic"], "--key", given["key"]],
            _to_key,
        ),
        Write(
            "clear",
            "Clear the backlog of a durable",
            ("topic", "durable"),
            _clear,
            lambda given: ["durable", "clear-backlog", given["topic"], given["durable"]],
            _to_durables,
        ),
        Write(
            "rewind",
            "Rewind a durable to the earliest change",
            ("topic", "durable"),
            _rewind,
            lambda given: ["durable", "rewind", given["topic"], given["durable"], "earliest"],
            _to_durables,
        ),
        Write(
            "end",
            "End a subscription",
            ("id",),
            _end,
            lambda given: ["sessions", "--end", given["id"]],
            lambda given: ("connections", {}),
        ),
    )
}
