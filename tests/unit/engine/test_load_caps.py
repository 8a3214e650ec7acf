"""Loads of topics with caps: a load is refused as a whole, by the records that it makes (rule T7)."""

from __future__ import annotations

import pytest

from sow_server.engine.loads import Load, LoadPart, applying
from sow_server.engine.values.errors import Reason, StoreError
from tests.unit.engine.test_loads import Loaded, reason, rig

__all__ = ["rig"]  # a fixture


def commit_measured(rig: Loaded, load: str, *parts: tuple[int, int, int]) -> Load:
    """As the service commits a load."""
    loads, named = rig.store.loads, [LoadPart(*part) for part in parts]
    try:
        return rig.heard(loads.commit(load, named))
    except StoreError as refused:
        if refused.reason is not Reason.TOPIC_FULL:
            raise
        return rig.heard(loads.commit(load, named, loads.content(load, named)))


@pytest.mark.parametrize("caps", [{"max_records": 2}, {"max_stored_bytes": 6}])
def test_a_load_beyond_a_cap_is_refused_before_it_changes_anything(rig: Loaded, caps: dict[str, int]) -> None:
    """T7: it can be committed once the cap is raised."""
    rig.put("t", "a", b"old")
    rig.alter_topic("t", caps)
    load = rig.open_load()
    rig.stage(load, [("b", b"12"), ("c", b"12"), ("d", b"12")])
    with pytest.raises(StoreError, match=f"more than {next(iter(caps))} of topic t allows") as refused:
        commit_measured(rig, load, (0, 1, 3))
    assert (refused.value.reason, refused.value.field) == (Reason.TOPIC_FULL, "parts")
    assert rig.payloads() == {"a": b"old"}
    rig.alter_topic("t", dict.fromkeys(caps))
    commit_measured(rig, load, (0, 1, 3))
    rig.finish(load)
    assert set(rig.payloads()) == {"b", "c", "d"}


def test_a_load_is_judged_by_the_records_that_it_makes(rig: Loaded) -> None:
    """T7: a key counts once, with the row that counts; the present records do not. So a full topic can be replaced, and
    is above its cap meanwhile."""
    for key in "ab":
        rig.put("t", key, b"old!")
    rig.alter_topic("t", max_records=2, max_stored_bytes=10)
    load = rig.open_load()
    rig.stage(load, [("c", b"123456789"), ("c", b"1234"), ("c", b"1234")], attempt=1)
    rig.stage(load, [("c", b"1234"), ("d", b"1234")], part=1, attempt=7)
    rig.stage(load, [("x", b"dropped"), ("y", b"dropped"), ("z", b"dropped")], part=1, attempt=6)
    commit_measured(rig, load, (0, 1, 3), (1, 7, 2))
    rig.step_load(load)
    assert set(rig.payloads()) == {"a", "b", "c", "d"}
    assert [one.reason for one in rig.put("t", "e").refusals] == [Reason.TOPIC_FULL]
    rig.finish(load)
    assert set(rig.payloads()) == {"c", "d"}


def test_rows_that_come_while_a_load_is_measured_are_not_passed_over(rig: Loaded) -> None:
    """T7: what was measured is what is committed."""
    rig.alter_topic("t", max_records=1)
    load = rig.open_load()
    rig.stage(load, [("a", b"1")])
    named = [LoadPart(0, 1, 2)]
    assert rig.store.loads.content(load, named) is None
    rig.stage(load, [("b", b"1")], first=2)
    assert reason(lambda: rig.heard(rig.store.loads.commit(load, named, None))) is Reason.TOPIC_FULL


@pytest.mark.parametrize(
    ("caps", "fits"), [({"max_records": 3}, False), ({"max_records": 5}, True), ({"max_records": None}, True)]
)
def test_a_cap_that_is_raised_after_the_count_is_the_one_that_counts(
    rig: Loaded, monkeypatch: pytest.MonkeyPatch, caps: dict[str, int | None], fits: bool
) -> None:
    """T7: the count ended where it was beyond the cap. It passed for all of the load once the cap was above it."""
    monkeypatch.setattr(applying, "READ_ROWS", 2)
    rig.alter_topic("t", max_records=1)
    load = rig.open_load()
    rig.stage(load, [(key, b"1") for key in "abcde"] + [("a", b"1")])
    named = [LoadPart(0, 1, 6)]
    assert reason(lambda: rig.heard(rig.store.loads.commit(load, named))) is Reason.TOPIC_FULL
    content = rig.store.loads.content(load, named)
    assert content == (5, 10)
    rig.alter_topic("t", caps)
    if not fits:
        assert reason(lambda: rig.heard(rig.store.loads.commit(load, named, content))) is Reason.TOPIC_FULL
        assert rig.payloads() == {}
        return
    rig.heard(rig.store.loads.commit(load, named, content))
    rig.finish(load)
    assert set(rig.payloads()) == set("abcde")


def test_a_row_that_a_smaller_one_replaces_does_not_count_once_a_cap_is_raised(
    rig: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T7: the count ended between the two rows of the key, and the load was refused once too often."""
    monkeypatch.setattr(applying, "READ_ROWS", 2)
    rig.alter_topic("t", max_records=1, max_stored_bytes=50)
    load = rig.open_load()
    rig.stage(load, [("a", b"1"), ("b", b"x" * 90)])
    rig.stage(load, [("b", b"1")], part=1)
    named = [LoadPart(0, 1, 2), LoadPart(1, 1, 1)]
    content = rig.store.loads.content(load, named)
    rig.alter_topic("t", max_records=2)
    rig.heard(rig.store.loads.commit(load, named, content))
    rig.finish(load)
    assert rig.payloads() == {"a": b"1", "b": b"1"}
