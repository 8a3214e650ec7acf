"""Writes that a person may ask for where the console was started with `--allow-writes`.

[1]  Each is a call as that person, so the server permits, refuses and audits it as ever.
[2]  The page first asks, tells what follows as far as the server knows it, and shows the command that does the same.
[3]  A record is changed as it was seen, or not at all, where the write names its version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from sow_client import EARLIEST, NEVER, InvalidArgument, NotFound, PayloadForm, Record, SowError, Topic
from sow_client._records import Ttl
from sow_console import consequences, documents, editing, letter_contents, texts
from sow_console.comparing import matching
from sow_console.pages import cells
from sow_console.pages.page import View, operands

Fields: TypeAlias = Mapping[str, str]
Command: TypeAlias = Sequence[str]
"""Arguments of `sow`."""
REFUSED_SECONDS: Final = 0.5
"""A run that is refused at once is told on the page that began it."""
COMMAND_BYTES_MAX: Final = 4_096
"""A longer payload is not shown in a command."""
DIFFERENCES_MAX: Final = 20
"""Fields whose change is told before an edit."""
CREATED_WITH: Final = ("key", "message_type", "expiration", "max_ttl", "index", "retain_time", "dead_letter")
"""The settings that the page for a new topic asks for."""
KEYLESS: Final = "Without key fields, each publish gives the key."


@dataclass(frozen=True, slots=True)
class Question:
    """The page asks this before a write."""

    commands: Sequence[Command]
    """Those that do the same, one after the other."""
    follows: Sequence[str] = ()
    """Sentences: what follows from the write."""
    pinned: Fields | None = None
    """Fields of the form that hold what was seen ([3])."""
    filled: Fields | None = None
    """Options that the form begins with."""
    hints: Fields | None = None
    """Better ones than those of the options."""


@dataclass(frozen=True, slots=True)
class Write:
    """One kind of write."""

    name: str
    title: str
    fields: tuple[str, ...]
    """The arguments; all must be given."""
    do: Callable[[View, Fields], Awaitable[str]]
    """Does it, and says what was done. Raises SowError."""
    ask: Callable[[View, Fields], Awaitable[Question]]
    """Raises SowError."""
    back: Callable[[Fields], tuple[str, dict[str, str]]]
    """The page to go back to, and its arguments."""
    pinned: tuple[str, ...] = ()
    """Arguments that `ask` fills in."""
    options: Mapping[str, str] | None = None
    """Arguments that may be empty and can be edited on the page, each with a hint."""
    long: tuple[str, ...] = ()
    """Options of many lines. A form with one is posted, also to look again: an address has no room for them."""


def _plainly(words: Callable[[Fields], Command], *follows: str) -> Callable[[View, Fields], Awaitable[Question]]:
    async def ask(view: View, given: Fields) -> Question:
        return Question((words(given),), follows)

    return ask


# ---- records ----


async def _touch(view: View, given: Fields) -> str:
    done = await view.client.touch(given["topic"], given["key"], ttl=given["ttl"])
    return "It expires at " + done.expire_time.isoformat() if done.expire_time else "It never expires."


async def _persist(view: View, given: Fields) -> str:
    await view.client.persist(given["topic"], given["key"])
    return "It never expires."


async def _delete(view: View, given: Fields) -> str:
    done = await view.client.sow_delete(
        given["topic"], keys=[given["key"]], only_if_versions=[_version(given["version"])]
    )
    if done.deleted:
        return "The record is deleted."
    return "Nothing was deleted: there is no live record of this key at this version any more."


async def _ask_delete(view: View, given: Fields) -> Question:
    words = ["delete", given["topic"], "--key", given["key"], "--if-version", given["version"]]
    record = await view.client.get(given["topic"], given["key"])
    if record is None:
        return Question((words,), ("There is no live record of this key any more.",))
    if str(record.version) != given["version"]:
        return Question(
            (words,), ("The record has changed since you saw it, so it will stay: go back and look again.",)
        )
    return Question((words,), ("Only this version of the record is deleted. Subscribers and peers are told.",))


async def _ask_add(view: View, given: Fields) -> Question:
    topic = await view.client.describe_topic(given["topic"])
    hints = {"payload": editing.hint(_form_of(topic))}
    if topic.settings.key:
        hints["key"] = f"leave it empty: it comes from {' '.join(topic.settings.key)}"
    if not given["payload"]:
        return Question((), ("Give the payload.", _lives(topic)), hints=hints)
    payload = editing.payload_of(_form_of(topic), given["payload"])
    words = _publish_words(given, payload, "--if-absent")
    words += ["--ttl", given["ttl"]] if given["ttl"] else []
    follows = ["It is added only if there is no live record of its key."]
    follows += [f"It lives for {given['ttl']}."] if given["ttl"] else [_lives(topic)]
    return Question((words,), follows, hints=hints)


async def _add(view: View, given: Fields) -> str:
    topic = await view.client.describe_topic(given["topic"])
    payload = editing.payload_of(_form_of(topic), given["payload"])
    done = await view.client.publish(
        given["topic"], payload, key=given["key"] or None, ttl=_lifetime(given["ttl"]), only_if_absent=True
    )
    return f"The record {done.key} is added, as version {done.version}."


async def _ask_edit(view: View, given: Fields) -> Question:
    topic, record = await _seen(view, given)
    hints = {"payload": editing.hint(record.form)}
    if not given["payload"]:
        begun = ("Change the payload, and look at what follows.",)
        return Question((), begun, filled={"payload": editing.text_of(record.form, record.payload)}, hints=hints)
    payload = editing.payload_of(record.form, given["payload"])
    words = _publish_words(given if not topic.settings.key else {**given, "key": ""}, payload)
    words += ["--if-version", given["version"], *(["--ttl", given["ttl"]] if given["ttl"] else ["--keep-ttl"])]
    follows = [f"Only version {given['version']} of the record is replaced. Subscribers and peers are told."]
    follows += [f"{before} → {after}" for before, after in _differences(record, payload)]
    if moved := editing.moved(topic.settings.key, documents.shown(record), payload):
        raise InvalidArgument(
            f"{', '.join(moved)}: a key field differs, so this is another record: add it instead",
            reason="INVALID_ARGUMENT",
        )
    left = f"expires {texts.relative(record.expire_time, view.now)}" if record.expire_time else "never expires"
    follows.append(f"It lives for {given['ttl']} from now on." if given["ttl"] else f"It {left}, as before.")
    return Question((words,), follows, hints=hints)


async def _edit(view: View, given: Fields) -> str:
    topic, record = await _seen(view, given)
    done = await view.client.publish(
        given["topic"],
        editing.payload_of(record.form, given["payload"]),
        key=None if topic.settings.key else given["key"],
        ttl=_lifetime(given["ttl"]),
        keep_ttl=not given["ttl"],
        only_if_version=_version(given["version"]),
    )
    return f"The record is replaced, as version {done.version}."


async def _seen(view: View, given: Fields) -> tuple[Topic, Record]:
    """The topic, and the record at the version that was seen ([3])."""
    record = await view.client.get(given["topic"], given["key"])
    if record is None or str(record.version) != given["version"]:
        now = "is gone" if record is None else "has changed"
        raise NotFound(f"the record {now} since you saw it: go back and look again", reason="NOT_FOUND")
    return await view.client.describe_topic(given["topic"]), record


def _differences(record: Record, payload: bytes) -> list[tuple[str, str]]:
    """Fields of JSON that differ, before and after."""
    was, now = documents.leaves(documents.shown(record)), documents.leaves(payload)
    if was is None or now is None:
        return []
    paths = [path for path in (was | now) if was.get(path) != now.get(path)]
    return [(f"{path} {was.get(path, '–')}", now.get(path, "–")) for path in paths[:DIFFERENCES_MAX]]


def _publish_words(given: Fields, payload: bytes, *more: str) -> list[str]:
    shown = _shown(payload)
    words = ["publish", given["topic"], *(["payload.bin", "--raw"] if shown is None else ["--data", shown])]
    return [*words, *(["--key", given["key"]] if given["key"] else []), *more]


def _form_of(topic: Topic) -> PayloadForm:
    return PayloadForm(topic.settings.message_type, topic.settings.fix_separator or "\x01")


def _lifetime(text: str) -> Ttl | None:
    return NEVER if text == "never" else text or None


def _lives(topic: Topic) -> str:
    """The lifetime of a record that is published without one."""
    expiration = str(topic.settings.expiration)
    if expiration in ("enabled", "disabled", "reject"):
        return "The new record never expires, unless you give it a lifetime."
    return f"The new record lives for {expiration}, as {topic.name} has it, unless you give it another one."


# ---- dead letters ----


async def _ask_republish(view: View, given: Fields) -> Question:
    letter, target, present = await _looked_at(view, given)
    expected = str(present) if present else "0"
    words = ["publish", given["target"]]
    shown = _shown(letter.payload)
    words += ["letter.bin", "--raw"] if shown is None else ["--data", shown]
    if not target.settings.key:
        words += ["--key", letter.record_key]
    if given.get("ttl"):
        words += ["--ttl", given["ttl"]]
    words += ["--if-version", expected] if present else ["--if-absent"]
    follows = [
        f"{given['target']} has a live record of this key now, version {present}: it is replaced."
        if present
        else f"{given['target']} has no live record of this key.",
        "The letter is deleted afterwards.",
    ]
    if not given.get("ttl"):
        follows.insert(1, _lives(target))
    after = ["delete", given["topic"], "--key", given["key"], "--if-version", given["version"]]
    return Question((words, after), follows, {"expected": expected})


async def _republish(view: View, given: Fields) -> str:
    letter, target, _ = await _looked_at(view, given)
    expected = _version(given["expected"], least=0)
    done = await view.client.publish(
        given["target"],
        letter.payload,
        key=None if target.settings.key else letter.record_key,
        ttl=given.get("ttl") or None,
        only_if_absent=not expected,
        only_if_version=expected or None,
    )
    said = f"It is published, as version {done.version}"
    try:
        await view.client.sow_delete(given["topic"], keys=[given["key"]], only_if_versions=[letter.version])
    except SowError as error:
        return f"{said}; the letter stays ({error.reason}: {error.message})."
    return f"{said}, and the letter is deleted."


def _shown(payload: bytes) -> str | None:
    """The payload for a command line; None: it does not fit there."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return None
    return text if len(payload) <= COMMAND_BYTES_MAX and "\0" not in text else None


async def _looked_at(view: View, given: Fields) -> tuple[letter_contents.Letter, Topic, int | None]:
    """The letter that was seen, the topic that it goes to, and the version of the record that is there now."""
    record = await view.client.get(given["topic"], given["key"])
    if record is None or str(record.version) != given["version"]:
        raise NotFound("the letter is gone, or is another one now", reason="NOT_FOUND")
    target = await view.client.describe_topic(given["target"])
    letter = letter_contents.read(record, cells.all_of(await cells.topics(view)))
    present = await view.client.get(given["target"], letter.record_key) if letter.record_key else None
    return letter, target, None if present is None else present.version


# ---- durables and subscriptions ----


async def _clear(view: View, given: Fields) -> str:
    await view.client.clear_backlog(given["topic"], given["durable"])
    return "Its whole backlog counts as acknowledged."


async def _ask_clear(view: View, given: Fields) -> Question:
    words = ["durable", "clear-backlog", given["topic"], given["durable"]]
    figures = (await view.client.describe_durable(given["topic"], given["durable"])).figures
    waiting = figures.unacknowledged_entries if figures else 0
    return Question((words,), (f"{waiting:,} changes are acknowledged that no consumer has processed.",))


async def _rewind(view: View, given: Fields) -> str:
    done = await view.client.rewind(
        given["topic"],
        given["durable"],
        EARLIEST if given["to"] in ("", "earliest") else given["to"],
        force=given.get("force") == "yes",
    )
    return f"{done.unacknowledged_entries:,} changes are to be consumed again."


async def _ask_rewind(view: View, given: Fields) -> Question:
    words = ["durable", "rewind", given["topic"], given["durable"], given["to"] or "earliest"]
    durable = await view.client.describe_durable(given["topic"], given["durable"])
    follows = []
    if durable.figures:
        follows.append(
            f"{durable.figures.total_entries:,} changes can be read from the earliest position on; "
            f"{durable.figures.unacknowledged_entries:,} of them are not acknowledged now."
        )
    follows.append("Consumers get changes again that they have processed before.")
    if durable.attached:
        follows.append("A consumer is attached: it is only done with force, and ends the consumer's stream.")
    if given.get("force") == "yes":
        words.append("--force")
    return Question((words,), follows)


async def _end(view: View, given: Fields) -> str:
    client, number = cells.of_id(view, given["id"])
    await client.end_subscription(number)
    return "It ends. Its client may subscribe again."


async def _end_session(view: View, given: Fields) -> str:
    client, number = cells.of_id(view, given["id"])
    ended = await client.end_session(number)
    return f"{ended} calls end. Their client may make them again."


# ---- replication ----


async def _ask_compare(view: View, given: Fields, *, repairs: bool) -> Question:
    words = ["replication", "repair" if repairs else "verify", given["peer"]]
    if given.get("topic"):
        words += ["--topic", given["topic"]]
    follows = ["It goes on while you look at other pages, and ends when you log out. Topics that are done stay done."]
    if repairs:
        follows.insert(0, "Of each key that differs the newest version is written at both ends.")
    else:
        follows.insert(0, "Nothing is changed. Both ends read all records of the topics.")
    return Question((words,), follows)


async def _compare(view: View, given: Fields, *, repairs: bool) -> str:
    status = await view.client.replication_status()
    patterns = [link.topics_pattern for link in status.outgoing if link.peer == given["peer"]]
    names = [one.name for one in await view.client.here.topics()]
    topics = [given["topic"]] if given.get("topic") else []
    total = 1 if topics else matching(names, patterns[0]) if patterns else None
    running = view.session.compare(view.server, given["peer"], topics, repairs=repairs, topics_total=total)
    await asyncio.wait({asyncio.create_task(running.wait())}, timeout=REFUSED_SECONDS)
    if running.error is not None:
        raise running.error
    return "It runs. The page shows how far it is."


# ---- settings ----


async def _ask_alter(view: View, given: Fields) -> Question:
    topic, setting = await view.client.describe_topic(given["topic"]), given["setting"]
    present = next((one for one in topic.effective if one.name == setting), None)
    if present is None:
        raise NotFound(f"there is no setting {setting!r}", reason="NOT_FOUND")
    follows = [f"It is {present.value or 'not set'} now, from: {present.origin}."]
    if topic.set_in_config:
        follows.append("The configuration file declares this topic: change it there.")
    if setting in consequences.UNCHANGEABLE:
        follows.append("It changes only while the topic is empty.")
    if not given.get("value"):
        return Question((), (*follows, f"Give a value: {consequences.hint(setting)}."))
    value = consequences.parsed(setting, given["value"])
    follows += await consequences.follows(view.client, topic, setting, value, view.now)
    if value is None:
        follows.append("A policy or the server's default applies then.")
    if present.origin.startswith("operator policy"):
        follows.append("An operator policy limits it: the stricter value counts.")
    return Question((consequences.words(given["topic"], setting, value),), follows)


async def _alter(view: View, given: Fields) -> str:
    setting = given["setting"]
    value = consequences.parsed(setting, given.get("value", ""))
    done = await view.client.alter_topic(given["topic"], **{setting: value})
    described = await view.client.describe_topic(given["topic"])
    present = next(one for one in described.effective if one.name == setting)
    warned = f" The server warns: {' '.join(done.warnings)}" if done.warnings else ""
    return f"It is {present.value or 'not set'} now, from: {present.origin}.{warned}"


async def _ask_create(view: View, given: Fields) -> Question:
    if not given["topic"]:
        return Question((), ("Give the name of the topic, and settings where they are to be others than usual.",))
    settings = _settings_of(given)
    words = [
        "topic", "create", given["topic"],
        *(word for name, value in settings.items() for word in consequences.words("", name, value)[3:]),
    ]  # fmt: skip
    if given["topic"] in await cells.names(view):
        raise InvalidArgument(f"there is a topic {given['topic']} already", reason="TOPIC_EXISTS")
    follows = [f"The key of a record comes from {' '.join(settings['key'])}." if settings.get("key") else KEYLESS]
    follows.append("The key and the message type change only while the topic is empty; the page Settings has the rest.")
    follows.append("A setting that is not given comes from a policy that matches the name, or is the server's default.")
    return Question((words,), follows)


async def _create(view: View, given: Fields) -> str:
    if not given["topic"]:
        raise InvalidArgument("topic: is missing", reason="INVALID_ARGUMENT")
    done = await view.everywhere.create_topic(given["topic"], **_settings_of(given))
    warned = f" The server warns: {' '.join(done.warnings)}" if done.warnings else ""
    return f"The topic {done.name} is there.{warned}"


def _settings_of(given: Fields) -> dict[str, Any]:  # each of the type that its setting has
    """The settings that were given. Raises InvalidArgument."""
    parsed = {name: consequences.parsed(name, given[name]) for name in CREATED_WITH if given[name]}
    return {name: value for name, value in parsed.items() if value != ()}


# ---- helpers ----


def _version(text: str, *, least: int = 1) -> int:
    if not text.isdecimal() or len(text) > 19 or int(text) < least:
        raise NotFound(f"{text!r} is no version of a record", reason="INVALID_ARGUMENT")
    return int(text)


def _to_key(given: Fields) -> tuple[str, dict[str, str]]:
    return "key", {"topic": given["topic"], "key": given["key"]}


def _to_records(given: Fields) -> tuple[str, dict[str, str]]:
    return "records", {"topic": given["topic"]}


def _to_durables(given: Fields) -> tuple[str, dict[str, str]]:
    return "durables", {"topic": given["topic"]}


def _to_letters(given: Fields) -> tuple[str, dict[str, str]]:
    return "dead-letters", {"topic": given["topic"]}


def _to_replication(given: Fields) -> tuple[str, dict[str, str]]:
    return "replication", {}


def _to_settings(given: Fields) -> tuple[str, dict[str, str]]:
    return "topic", {"topic": given["topic"]}


def _to_connections(given: Fields) -> tuple[str, dict[str, str]]:
    return "connections", {}


_WRITES: Final = (
    Write(
        "touch",
        "Give a record another lifetime",
        ("topic", "key", "ttl"),
        _touch,
        _plainly(lambda given: ["touch", "--ttl", given["ttl"], *operands(given["topic"], given["key"])]),
        _to_key,
    ),
    Write(
        "persist",
        "Take a record's lifetime away",
        ("topic", "key"),
        _persist,
        _plainly(lambda given: ["persist", *operands(given["topic"], given["key"])]),
        _to_key,
    ),
    Write("delete", "Delete a record", ("topic", "key", "version"), _delete, _ask_delete, _to_key),
    Write(
        "add",
        "Add a record",
        ("topic",),
        _add,
        _ask_add,
        _to_records,
        options={"key": "only in a topic without key fields", "payload": "", "ttl": "lifetime, such as 20m; never"},
        long=("payload",),
    ),
    Write(
        "edit",
        "Edit a record",
        ("topic", "key", "version"),
        _edit,
        _ask_edit,
        _to_key,
        options={"payload": "", "ttl": "another lifetime, such as 20m; never; empty: it stays"},
        long=("payload",),
    ),
    Write(
        "create",
        "Create a topic",
        (),
        _create,
        _ask_create,
        _to_settings,
        options={"topic": "its name", **{name: consequences.hint(name) for name in CREATED_WITH}},
    ),
    Write(
        "republish",
        "Publish a dead letter again",
        ("topic", "key", "version", "target"),
        _republish,
        _ask_republish,
        _to_letters,
        pinned=("expected",),
        options={"ttl": "lifetime, such as 20m"},
    ),
    Write("clear", "Clear the backlog of a durable", ("topic", "durable"), _clear, _ask_clear, _to_durables),
    Write(
        "rewind",
        "Rewind a durable",
        ("topic", "durable"),
        _rewind,
        _ask_rewind,
        _to_durables,
        options={
            "to": "earliest, or a bookmark, a sequence, a time",
            "force": "yes: also while a consumer is attached",
        },
    ),
    Write(
        "alter",
        "Change a setting of a topic",
        ("topic", "setting"),
        _alter,
        _ask_alter,
        _to_settings,
        options={"value": "value"},
    ),
    Write(
        "repair",
        "Exchange the differences with a peer",
        ("peer",),
        partial(_compare, repairs=True),
        partial(_ask_compare, repairs=True),
        _to_replication,
        options={"topic": "only this topic; empty: all"},
    ),
    Write(
        "end",
        "End a subscription",
        ("id",),
        _end,
        _plainly(lambda given: ["sessions", "--end", given["id"]], "Its client may subscribe again."),
        _to_connections,
    ),
    Write(
        "end-session",
        "End the calls of a session",
        ("id",),
        _end_session,
        _plainly(
            lambda given: ["sessions", "--end", given["id"]],
            "Its subscriptions and other calls that last end. Its client may make them again.",
        ),
        _to_connections,
    ),
)
CHECKS: Final[Mapping[str, Write]] = {
    one.name: one
    for one in (
        Write(
            "verify",
            "Compare with a peer",
            ("peer",),
            partial(_compare, repairs=False),
            partial(_ask_compare, repairs=False),
            _to_replication,
            options={"topic": "only this topic; empty: all"},
        ),
    )
}
"""They change nothing, and are there without `--allow-writes`; but they cost, so they ask, too."""
WRITES: Final[Mapping[str, Write]] = {one.name: one for one in _WRITES}
