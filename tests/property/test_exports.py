"""Despite changes meanwhile, the parts of an export together are the records that were alive at its `as_of`, each
once, in whatever order, however often and in however many pieces they are read (rule Q6; export_parts [1],
export_parts [2])."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from sow_server.engine.disk.rocks import cursor
from sow_server.engine.stored import HEADER_BYTES
from sow_server.engine.values.model import ABSENT, Delete, Lifetime, LifetimeKind, Publish
from sow_server.query import export_parts, race, sources
from sow_server.query.export_parts import Chosen, Export, Reading
from sow_server.query.export_splits import SplitCache
from sow_server.query.export_tokens import read_token, write_token
from sow_server.query.filtering import record_filter
from tests.support.oracles.examples import examples
from tests.support.stores.stores import BINARY, SECOND, Rig

KEYS = [f"{n:03d}" for n in range(120)]
SMALL = {
    export_parts: {"PART_RECORDS_MIN": 2, "SAMPLES_MIN": 8, "SAMPLES_PER_PART": 2, "SAMPLE_CHUNK": 5},
    sources: {"RANGE_FIRST": 2, "SCAN_CHUNK": 6, "FIND_CHUNK": 4},
    race: {"FIND_CHUNK": 4},
    cursor: {"STEPS_AT_ONCE": 2, "VALUES_AT_ONCE": 3},
}
FILTERS = ("", "@key >= '030' AND @key < '090'", "@key IN ('001', '050', '119')", "@key < '020' OR @key >= '100'")


def change(rig: Rig, random: Random) -> None:
    """Something happens to the topic, or beside it."""
    keys = random.sample(KEYS, random.randint(1, 40))
    match random.randrange(8):
        case 0 | 1 | 2:
            lifetime = random.choice([ABSENT, Lifetime(LifetimeKind.TTL, random.randint(1, 5) * SECOND)])
            payloads = [random.randbytes(random.choice([3, 100])) for _ in keys]
            rig.run(Publish(random.choice(["t", "t", "other"]), payloads, keys=keys, lifetime=lifetime))
        case 3:
            rig.run(Delete("t", keys))
        case 4:
            rig.time.tick(random.randint(1, 3) * SECOND)
        case 5:
            rig.store.sweep()
        case 6:
            rig.store._rocks.flush()
        case 7:
            rig.store.upkeep.compact()


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 2**32), parts=st.integers(0, 12), text=st.sampled_from(FILTERS), keys_wanted=st.booleans())
def test_an_export_has_the_records_alive_at_its_cut_despite_later_changes(
    seed: int, parts: int, text: str, keys_wanted: bool
) -> None:
    random = Random(seed)
    with ExitStack() as stack:
        for module, constants in SMALL.items():
            for name, value in constants.items():
                stack.enter_context(mock.patch.object(module, name, value))
        rig = Rig(Path(stack.enter_context(TemporaryDirectory())))
        stack.callback(rig.close)
        for name in ("before", "t", "other"):
            rig.create_topic(name, BINARY)
        splits = SplitCache()
        for _ in range(2):
            for _ in range(random.randint(1, 8)):
                change(rig, random)
            topic = rig.topic("t")
            given_filter = record_filter(topic, text, 0) if text else None
            alive = rig.live("t")
            opened = Export(rig.store.cuts, [Chosen(topic, given_filter, parts)], splits)
            while not opened.prepare():
                change(rig, random)
            sizes = [part.records for part in opened.parts]
            assert len(sizes) < 2 or min(sizes) >= export_parts.PART_RECORDS_MIN
            expected = sorted(
                record.payload
                for key, record in alive.items()
                if record_filter(topic, text or "1 = 1", 0).matches(key, bytes(HEADER_BYTES))
            )
            for _ in range(2):
                assert sorted(read(opened, random, rig, keys_wanted=keys_wanted)) == expected
            opened.close()


def read(opened: Export, random: Random, rig: Rig, *, keys_wanted: bool) -> list[bytes]:
    """All parts, their pieces in turns, now and then going on in a new call, while things happen."""
    payloads: list[bytes] = []
    readings: dict[int, Reading] = {
        part: opened.reading(part, keys_wanted=keys_wanted) for part in range(len(opened.parts))
    }
    while readings:
        if random.random() < 0.3:
            change(rig, random)
        part = random.choice(list(readings))
        piece = readings[part].step(random.randint(1, 9))
        if piece is None:
            del readings[part]
            continue
        payloads += [value[HEADER_BYTES:] for value in piece.values]
        if random.random() < 0.3:
            token = write_token(opened.id, part, piece.position)
            readings[part] = opened.reading(part, read_token(opened.id, part, token), keys_wanted=keys_wanted)
    return payloads
