"""Key: one record, its text, and its story."""

from __future__ import annotations

from sow_client import FailedPrecondition, History, NotFound, Record
from sow_console import documents, story
from sow_console.pages.page import Facts, View

CHAPTERS = 100


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
    try:
        history = await view.client.history(topic, key, entries_max=CHAPTERS, upto=upto or None)
    except (FailedPrecondition, NotFound) as error:
        no_history = error.message
    return {
        "topic": topic,
        "key": key,
        "asked": True,
        "record": record,
        "text": documents.pretty(record.payload) if record else "",
        "is_json": record is not None and documents.leaves(record.payload) is not None,
        "chapters": story.chapters(
            history.entries, instance.name, whole=not history.bookmark and not history.discarded
        ),
        "instance": instance.name,
        "older": history.bookmark,
        "discarded": history.discarded,
        "no_history": no_history,
        "is_newest": not upto,
        "command": view.command("get", topic, key),
    }


async def twin(view: View) -> Facts:
    """The same, with the payload as it was published."""
    made = dict(await facts(view))
    record = made.get("record")
    return made | {"record": documents.twin(record) if isinstance(record, Record) else None}
