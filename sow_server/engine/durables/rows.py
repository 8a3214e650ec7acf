"""Durables as stored: a row of `meta` each, JSON. A removed durable leaves a row that says when.

Only a replicated durable has the fields `born`, `buried`, `rewinds` and `restarts`, and only a pin `pin` and `reader`.
So others stay readable for earlier versions, and rows of those for this one.
"""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Final

from sow_peering import NO_STAMP, Stamp
from sow_server.engine.durables.model import DeliveryStep, Durable, DurableGap, GapReason, RemovedDurable

_STAMPS: Final = ("born", "buried")


def encode_durable(durable: Durable) -> bytes:
    """The row of a durable."""
    fields = durable._asdict()
    del fields["topic_id"], fields["name"]
    for name in _STAMPS:
        if fields[name] == NO_STAMP:
            del fields[name]
    for name in ("rewinds", "restarts", "pin", "reader"):
        if not fields[name]:
            del fields[name]
    fields["gaps"] = [[gap.reason.value, gap.after, gap.upto, gap.entries] for gap in durable.gaps]
    fields["declared"] = dict(durable.declared)
    fields["deliveries"] = [list(step) for step in durable.deliveries]
    return json.dumps(fields).encode()


def encode_removed(removed: RemovedDurable) -> bytes:
    """The row of a durable that was removed."""
    stamps = {"buried": removed.buried, "idle": removed.idle}
    known = {name: stamp for name, stamp in stamps.items() if stamp != NO_STAMP}
    return json.dumps({"removed": removed.removed_micros, **known}).encode()


def decode_durable(topic_id: int, name: str, row: bytes) -> Durable | RemovedDurable:
    """The durable of a row, or when it was removed."""
    fields: dict[str, object] = json.loads(row)
    if "removed" in fields:
        removed: int = fields["removed"]  # type: ignore[assignment]  # JSON as encode_removed wrote it
        return RemovedDurable(removed, _stamp(fields.get("buried")), _stamp(fields.get("idle")))
    known: dict[str, object] = {field: value for field, value in fields.items() if field in Durable._fields}
    known |= {field: _stamp(fields.get(field)) for field in _STAMPS}
    rewinds: list[list[object]] = known.get("rewinds", [])  # type: ignore[assignment]  # JSON as encode_durable wrote it
    known["rewinds"] = tuple(map(_stamp, rewinds))
    gaps: list[list[int]] = known["gaps"]  # type: ignore[assignment]  # JSON as encode_durable wrote it
    known["gaps"] = tuple([DurableGap(GapReason(reason), *numbers) for reason, *numbers in gaps])
    steps: list[list[int]] = known.get("deliveries", [])  # type: ignore[assignment]  # as above; older rows have none
    known["deliveries"] = tuple([DeliveryStep(*step) for step in steps])
    known["declared"] = MappingProxyType(dict(known["declared"]))  # type: ignore[call-overload]  # as above
    return Durable(topic_id=topic_id, name=name, **known)  # type: ignore[arg-type]  # as above


def _stamp(stored: object) -> Stamp:
    return Stamp(*stored) if isinstance(stored, list) else NO_STAMP
