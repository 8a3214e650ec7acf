"""A caller with rows changes only records that it may see, into records that it may see (rule A4).

Random publishes, deltas, touches and conditions of a caller against a plain model. A record that it may not see counts
as absent for conditions and touches. Only the refusal tells of it, and that is the same for a forbidden new record.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sow.v1 import sow_pb2, types_pb2
from sow_server.filters import parse
from tests.property.test_restrictions import KEYS, SIMPLE, Document, Pair, document
from tests.support.oracles.examples import examples

FORBIDDEN = (types_pb2.ERROR_REASON_PERMISSION_DENIED, "this publisher may not write this record", 0)


def merged(base: Any, delta: Any) -> Any:
    """Objects by field, everything else whole; null changes nothing (rule P2)."""
    if not (isinstance(base, dict) and isinstance(delta, dict)):
        return delta
    given = {name: value for name, value in delta.items() if value is not None}
    return {**base, **{name: merged(base.get(name), value) for name, value in given.items()}}


class Model:
    """The records of the topic, as the rules say."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.records: dict[str, Document] = {}
        self.versions: dict[str, int] = {}

    def shown(self, key: str, document: Document) -> bool:
        return self.pair.visible(key.encode(), msgspec.json.encode(document))

    def refusal(self, key: str, given: Document, condition: str, version: int, *, delta: bool) -> str:
        """The reason why a record is refused; "": it is not."""
        old = self.records.get(key)
        visible = old is not None and self.shown(key, old)
        holds = {
            "": True,
            "only_if_absent": not visible,
            "only_if_present": visible,
            "only_if_version": visible and self.versions[key] == version,
        }
        if not holds[condition]:
            return "CONDITION_FAILED"
        if old is not None and not visible:
            return "PERMISSION_DENIED"
        new = merged(old, given) if delta and old is not None else given
        return "" if self.shown(key, new) else "PERMISSION_DENIED"

    def publish(self, random: Random) -> None:
        """Desk publishes one record, or two in an atomic request."""
        delta, atomic = random.random() < 0.4, random.random() < 0.3
        keys = random.sample(KEYS, 2 if atomic else 1)
        condition = random.choice(["", "", "only_if_absent", "only_if_present", "only_if_version"])
        version = random.choice([*self.versions.values(), 1])
        request = sow_pb2.PublishRequest(topic="full", delta=delta, atomic=atomic)
        expected: list[str] = []
        changed: dict[str, Document] = {}
        for key in keys:
            given = document(random)
            if delta:
                given = {name: given[name] for name in random.sample(sorted(given), 1)}
            record = request.records.add(key=key, payload=msgspec.json.encode(given))
            if condition:
                setattr(record.condition, condition, version if condition == "only_if_version" else True)
            expected.append(self.refusal(key, given, condition, version, delta=delta))
            old = self.records.get(key)
            changed[key] = merged(old, given) if delta and old is not None else given
        (answer,) = self.pair.parts.answers("desk", "Publish", request)
        if atomic and any(expected):
            expected = [reason or "ATOMIC_ABORTED" for reason in expected]
        for key, result, reason in zip(keys, answer.results, expected, strict=True):
            told = types_pb2.ErrorReason.Name(result.refusal.reason).removeprefix("ERROR_REASON_")
            assert told == (reason or "UNSPECIFIED")
            old = self.records.get(key)
            if reason == "PERMISSION_DENIED":
                assert (result.refusal.reason, result.refusal.message, result.refusal.current_version) == FORBIDDEN
            elif reason == "CONDITION_FAILED" and old is not None and not self.shown(key, old):
                assert result.refusal.current_version == 0, "as if there were none"
            elif not reason:
                self.records[key], self.versions[key] = changed[key], result.version

    def touch(self, random: Random) -> None:
        """Desk touches some keys."""
        keys = random.sample(KEYS, 2)
        (answer,) = self.pair.parts.answers(
            "desk", "Touch", topic="full", keys=keys, lifetime=types_pb2.Lifetime(never=True)
        )
        for key, result in zip(keys, answer.results, strict=True):
            visible = key in self.records and self.shown(key, self.records[key])
            assert result.HasField("refusal") is not visible
            if visible:
                self.versions[key] = result.version
            else:
                assert result.refusal.message == f"key: there is no live record {key!r}"

    def seed(self, random: Random) -> None:
        """Root publishes."""
        for key in KEYS[:4]:
            made = document(random)
            records = [{"key": key, "payload": msgspec.json.encode(made)}]
            (answer,) = self.pair.parts.answers("root", "Publish", topic="full", records=records)
            self.records[key], self.versions[key] = made, answer.results[0].version

    def check(self) -> None:
        """The store equals the model, with the fields that are hidden from desk."""
        live = self.pair.rig.live("full")
        assert {key.decode(): msgspec.json.decode(record.payload) for key, record in live.items()} == self.records


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_caller_writes_only_records_that_it_may_see_before_and_after(seed: int) -> None:
    random = Random(seed)
    rows = parse(random.choice(SIMPLE))
    hidden = random.choice([[], ["/o/x"], ["/l", "/b"]])
    with TemporaryDirectory() as folder:
        pair = Pair(Path(folder), rows, hidden)
        with pair.parts:
            model = Model(pair)
            model.seed(random)
            for _ in range(15):
                (model.publish if random.random() < 0.8 else model.touch)(random)
                model.check()
        pair.rig.close()
