"""The values of a filter's parameters are looked at in a reader thread: 20,000 of them take tens of milliseconds, in
which the event loop would serve nobody else."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import pytest

from sow_server.engine.values.model import Publish, TopicSettings
from sow_server.services import admin_service, changes_service, snapshot_service
from sow_server.services.records import answering
from sow_server.services.wire import filter_values, subscribe_convert
from tests.support.fakes import guarded
from tests.support.fakes.guarded import GuardedParts
from tests.support.oracles.access import grant, identity
from tests.support.stores.stores import Rig

FILTER: Final = "/id IN :some"
SOME: Final = {"some": {"list": {"items": [{"null": True}, {"text": "a"}]}}}
CALLS: Final[dict[str, dict[str, Any]]] = {
    "Query": {"filter": FILTER},
    "Subscribe": {"filter": FILTER},
    "SowDelete": {"by_filter": FILTER},
    "Restamp": {"filter": FILTER, "mode": 3},
    "OpenExport": {"filter": FILTER},
    "ReadChanges": {"filter": FILTER},
}


@pytest.mark.parametrize("records_of_a_long_export", [0, 10**6])
def test_no_call_looks_at_values_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records_of_a_long_export: int
) -> None:
    looked: list[bool] = []
    reading = False
    read, submit = filter_values.filter_values, guarded._InThisThread.submit

    def in_reader(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        nonlocal reading
        reading = True
        try:
            return submit(self, fn, *args, **kwargs)
        finally:
            reading = False

    def watched(given: Any) -> Any:
        if given:
            looked.append(reading)
        return read(given)

    monkeypatch.setattr(guarded._InThisThread, "submit", in_reader)
    monkeypatch.setattr(snapshot_service, "LONG_RECORDS", records_of_a_long_export)
    for module in (admin_service, answering, changes_service, filter_values, snapshot_service, subscribe_convert):
        if hasattr(module, "filter_values"):
            monkeypatch.setattr(module, "filter_values", watched)
    rig = Rig(tmp_path)
    rig.create_topic("orders", TopicSettings(key=("/id",)))
    rig.run(Publish("orders", [b'{"id":"a"}']))
    boss = identity("boss", "boss") + grant("boss", ".*", "read publish delete consume topic-admin")
    with GuardedParts(rig, boss) as parts:
        end = rig.store.instance.bookmark(rig.store.commits.last_sequence)
        for method, fields in CALLS.items():
            del looked[:]
            if method == "ReadChanges":
                start = rig.store.instance.bookmark(0)
                fields = fields | {"start_bookmark": start, "end_bookmark": end, "history_bookmark": start}
            parts.answers("boss", method, topic="orders", parameters=SOME, **fields)
            assert looked, method
            assert all(looked), method
    rig.close()
