"""Durables as stored: a row of `meta` each, JSON. A removed durable leaves a row that says when."""

from __future__ import annotations

import json
from types import MappingProxyType

from sow_server.engine.durables.model import DeliveryStep, Durable, DurableGap, GapReason


def encode_durable(durable: Durable) -> bytes:
    """The row of a durable."""
    fields = durable._asdict()
    del fields["topic_id"], fields["name"]
    fields["gaps"] = [[gap.reason.value, gap.after, gap.upto, gap.entries] for gap in durable.gaps]
    fields["declared"] = dict(durable.declared)
    fields["deliveries"] = [list(step) for step in durable.deliveries]
    return json.dumps(fields).encode()


def encode_removed(removed_micros: int) -> bytes:
    """The row of a durable that was removed."""
    return json.dumps({"removed": removed_micros}).encode()


def decode_durable(topic_id: int, name: str, row: bytes) -> Durable | int:
    """The durable of a row, or when it was removed."""
    fields: dict[str, object] = json.loads(row)
    if "removed" in fields:
        removed: int = fields["removed"]  # type: ignore[assignment]  # JSON as encode_removed wrote it
        return removed
    known: dict[str, object] = {field: value for field, value in fields.items() if field in Durable._fields}
    gaps: list[list[int]] = known["gaps"]  # type: ignore[assignment]  # JSON as encode_durable wrote it
    known["gaps"] = tuple([DurableGap(GapReason(reason), *numbers) for reason, *numbers in gaps])
    steps: list[list[int]] = known.get("deliveries", [])  # type: ignore[assignment]  # as above; older rows have none
    known["deliveries"] = tuple([DeliveryStep(*step) for step in steps])
    known["declared"] = MappingProxyType(dict(known["declared"]))  # type: ignore[call-overload]  # as above
    return Durable(topic_id=topic_id, name=name, **known)  # type: ignore[arg-type]  # as above
