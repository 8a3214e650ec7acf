"""The answer to a publish or a touch of one record, as the commands tell it."""

from __future__ import annotations

import time

from sow_cli import display
from sow_cli.output import Fact
from sow_client import Published


def published_facts(topic: str, done: Published) -> list[Fact]:
    """The facts that a publish or a touch of one record returns."""
    expire = done.expire_time_micros
    now_micros = time.time_ns() // 1_000
    expires = (
        display.expire_time(expire, now_micros, acts=not done.ttl_ignored)
        if done.expire_time_known
        else display.UNKNOWN
    )
    facts = [
        Fact("topic", topic, topic),
        Fact("key", done.key, display.safe(done.key)),
        Fact("version", done.version or None, str(done.version or display.UNKNOWN)),
        Fact(
            "expire_time_micros",
            expire,
            expires,
            label="expires",
        ),
        Fact("sequence", done.sequence or None, str(done.sequence or display.UNKNOWN)),
        Fact("bookmark", done.bookmark, done.bookmark or "", in_lists=False),
        Fact("delivered", done.delivered, "" if done.delivered is None else display.count(done.delivered)),
    ]
    if done.ttl_ignored:
        facts.append(Fact("ttl_ignored", True, "" if expire is not None else "yes: the topic has expiration disabled"))
    if done.duplicate:
        facts.append(Fact("duplicate", True, "yes: an earlier attempt had been applied"))
    if not done.expire_time_known:
        facts.append(Fact("expire_time_known", False, ""))
    return facts
