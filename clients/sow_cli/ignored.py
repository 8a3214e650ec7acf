"""Remarks about lifetimes without effect: records of a topic that has expiration disabled keep theirs (rule L3)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from sow_cli.output import note
from sow_client import LifetimeIgnoredWarning, Published, Refusal, Topic


def count_ignored(outcomes: Iterable[Published | Refusal]) -> int:
    """How many records got a ttl or an expire time that has no effect."""
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


@contextmanager
def told_in_remarks() -> Iterator[None]:
    """The warnings of the client, which name a line of this command, are left to `remark`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LifetimeIgnoredWarning)
        yield
