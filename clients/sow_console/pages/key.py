"""Key: one record, its text, and its story."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from sow_client import FailedPrecondition, History, NotFound, Record, SowError
from sow_console import documents, letter_contents, story
from sow_console.pages.page import Facts, View, operands

CHAPTERS: Final = 100
LETTERS_MAX: Final = 1_000
"""Keys of dead letters that are looked up."""
STORY_BYTES: Final = 8_388_608
"""The story of a large record has fewer changes, as many as have about these bytes."""


async def facts(view: View) -> Facts:
    """The record that is there now, and the changes that the journal still has."""
    topic, key = view.argument("topic"), view.arguments.get("key", "")
    upto = view.argument("upto")
    if not topic or not key:
        return {"topic": topic, "key": key, "asked": False}
    found = await view.client.get_many(topic, [key])
    record = found[0] if found else None
    instance = await view.client.describe_instance()
    history, no_history = History((), "", discarded=False), ""
    size = len(record.payload) if record else 0
    entries_max = max(4, min(CHAPTERS, STORY_BYTES // max(1, size)))
    try:
        history = await view.client.history(topic, key, entries_max=entries_max, upto=upto or None)
    except (FailedPrecondition, NotFound) as error:
        no_history = error.message
    chapters = story.chapters(history.entries, instance.name, whole=not history.bookmark and not history.discarded)
    return {
        "topic": topic,
        "key": key,
        "asked": True,
        "record": record,
        "text": documents.pretty(documents.shown(record)) if record else "",
        "chapters": chapters,
        "letters": await _letters(view, topic, key, chapters),
        "instance": instance.name,
        "older": history.bookmark,
        "discarded": history.discarded,
        "no_history": no_history,
        "is_newest": not upto,
        "command": view.command("get", *operands(topic, key)),
    }


async def _letters(view: View, topic: str, key: str, chapters: Sequence[story.Chapter]) -> Facts:
    """The dead letters that were made of this key and are still there: topic and key of each, by the sequence of the
    change that it was made at; of changes that were set aside, the durable beside them."""
    described = await view.client.describe_topic(topic)
    target = described.settings.dead_letter
    if not target:
        return {}
    names: dict[str, tuple[str, str]] = {}
    durables = []
    with contextlib.suppress(SowError):
        durables = [one.name for one in await view.client.durables(topic)]
    by_key = described.settings.dead_letter_by_key
    for one in chapters:
        if one.event == "expired":
            names[key if by_key else letter_contents.copy_key(topic, key, one.version)] = (str(one.sequence), "")
        elif not by_key and one.payload:
            for durable in durables:
                names[letter_contents.copy_key(topic, key, one.version, durable)] = (str(one.sequence), durable)
        if len(names) >= LETTERS_MAX:
            break
    if not names:
        return {}
    found: dict[str, list[dict[str, str]]] = {}
    try:
        records = await view.client.get_many(target, list(names))
    except SowError:
        return {}  # it is missing, or not to be seen
    for record in records:
        sequence, durable = names[record.key]
        found.setdefault(sequence, []).append({"topic": target, "key": record.key, "durable": durable})
    return found


async def twin(view: View) -> Facts:
    """The same, with the payload as it was published."""
    made = dict(await facts(view))
    record = made.get("record")
    return made | {"record": documents.twin(record) if isinstance(record, Record) else None}
