"""Remarks on stderr about what is no error and may be a mistake: a lifetime without effect, as a topic that has
expiration disabled keeps its records (rule L3), a topic made by a mistyped name, a field that no record has."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from sow_cli.display import safe
from sow_cli.output import note
from sow_cli.session import near_names
from sow_client import LifetimeIgnoredWarning, Published, Refusal, Topic


def count_ignored(outcomes: Iterable[Published | Refusal]) -> int:
    """Counts records that got a ttl or an expire time that has no effect."""
    return sum(
        isinstance(one, Published) and one.ttl_ignored and one.expire_time_micros is not None for one in outcomes
    )


def remark(topic: str) -> None:
    """Tells on stderr that lifetimes have no effect, and what to do."""
    note(
        f"topic {topic} has expiration disabled: lifetimes are stored but not acted on; "
        f"`sow topic alter {topic} --expiration enabled` turns it on"
    )


def remark_at_once(topic: Topic | None, *, is_given: bool) -> bool:
    """Remarks if a lifetime is given that has no effect. True: it did. Of a lifetime in an option, a command tells this
    before it reads the input, which may never end."""
    if topic is None or not is_given or topic.settings.expiration != "disabled":
        return False
    remark(topic.name)
    return True


def remark_if_past(topic: Topic | None, expire_at: datetime | None) -> None:
    """Remarks if an expire time in an option is over: then it deletes live records (rule L7)."""
    if topic is None or expire_at is None or expire_at > datetime.now(UTC):
        return
    if topic.settings.expiration not in ("disabled", "reject") and topic.settings.min_ttl is None:
        note(
            f"{expire_at:%Y-%m-%dT%H:%M:%SZ} is over: the records expire at once, and live ones of their keys are gone"
        )


def remark_created(topic: str, names: Iterable[str]) -> None:
    """Tells that a publish has created its topic, which may have been a mistyped name."""
    near = near_names(topic, names)
    meant = f"; was {near[0]} meant? `sow topic delete {topic}` deletes this one" if near else ""
    note(f"there was no topic {topic}: this publish has created it{meant}")


def remark_on_fields(paths: Iterable[str]) -> None:
    """Tells of fields that no record has (rule Q10): a filter with a mistyped name finds nothing, or everything."""
    for path in paths:
        note(f"no record that was read has a value in {safe(path)}: is the name right?")


@contextmanager
def told_in_remarks() -> Iterator[None]:
    """The warnings of the client, which name a line of this command, are left to `remark`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LifetimeIgnoredWarning)
        yield
