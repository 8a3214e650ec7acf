"""Writers of partitions with a scripted client: what they publish, stage, delete and commit, and in which order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Self

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType

from sow_client import (
    NEVER,
    Ack,
    InvalidArgument,
    Load,
    LoadFigures,
    LoadPart,
    LoadProgress,
    NotFound,
    OpenedPublisher,
    PublishFailed,
    Refusal,
    SowError,
    TopicSettings,
    Unavailable,
)
from sow_spark import overwriting, rows, writing
from sow_spark.errors import SowSourceError
from sow_spark.options import Connecting, Writing
from sow_spark.rows import BadRow
from sow_spark.writing import Written

REFUSED = Refusal(1, "PAYLOAD_MALFORMED", "no")


class Sending:
    """A publisher, or a stager of a load: it settles what it has got when it is flushed."""

    def __init__(self, client: Sow, on_ack: Any = None) -> None:
        self._client = client
        self._on_ack = on_ack
        self.staged = 0
        self.refusals: list[Refusal] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.did.append("left")

    def _take(self, what: str, payloads: Sequence[bytes], keys: Any, *lifetimes: Any) -> None:
        self._client.did.append((what, list(payloads), keys, *lifetimes))
        refused = [one for one in self._client.refuses if one.index < len(payloads)]
        self.staged += len(payloads) - len(refused) - len(self._client.refuses_late)
        self.refusals += refused
        if self._on_ack is not None:
            self._on_ack(Ack(len(payloads) - len(refused), 0, tuple(refused), 1, 1, "fsync"))

    def publish_columns(
        self,
        payloads: Sequence[bytes],
        *,
        keys: Any,
        lifetime_kinds: Any = None,
        lifetime_micros: Any = None,
        removals: Any = None,
    ) -> None:
        if removals is None:
            self._take("published", payloads, keys, lifetime_kinds, lifetime_micros)
        else:
            self._take("with removals", payloads, keys, removals)

    def stage(
        self, payloads: Sequence[bytes], *, keys: Any, lifetime: Any, lifetime_kinds: Any, lifetime_micros: Any
    ) -> None:
        self._take("staged", payloads, keys, lifetime_kinds, lifetime_micros)
        self._client.lifetimes.append(lifetime)

    def flush(self) -> None:
        self._client.did.append("flushed")
        self.refusals += self._client.refuses_late

    def finish_unit(self, *, without_refused: bool = False) -> None:
        if self._client.refuses and not without_refused:
            raise PublishFailed(self._client.refuses)
        self._client.did.append("finished without refused" if without_refused else "finished")


class Sow:
    """The calls that writers make, in their order."""

    def instance_of(self, _topic: str) -> None:
        return None

    def servers_of(self, _topic: str) -> str:
        return "127.0.0.1:7450"

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.lifetimes: list[Any] = []
        self.refuses: list[Refusal] = []
        self.refuses_late: list[Refusal] = []
        """Refusals that come with the last answer only."""
        self.fails: dict[str, SowError] = {}
        self.unit = OpenedPublisher(epoch=5, unit_done=False, unit_records=0)
        self.settings = TopicSettings(key=("/id",))
        self.progress: list[LoadProgress] = []

    def _note(self, what: str, *of: object) -> None:
        self.did.append((what, *of))
        if what in self.fails:
            raise self.fails[what]

    def describe_topic(self, name: str) -> Any:
        if "described" in self.fails:
            raise self.fails["described"]
        return SimpleNamespace(name=name, settings=self.settings)

    def open_publisher(self, name: str, *, unit: int = 0, topic: str | None = None) -> OpenedPublisher:
        self._note("opened", name, unit)
        return self.unit

    def publisher(self, topic: str, **options: Any) -> Sending:
        self._note("publisher", options["publisher_id"], options["epoch"], options["unit"])
        self.lifetimes.append(options["ttl"])
        return Sending(self, options["on_ack"])

    def open_load(self, topic: str, *, lease: Any) -> Load:
        self._note("load", lease)
        return Load("load-1", timedelta(hours=1), 7)

    def stage_load(self, load: str, part: int, attempt: int, *, retry_for: float) -> Sending:
        self._note("stage", load, part, attempt)
        return Sending(self)

    def commit_load(self, load: str, parts: Sequence[LoadPart], *, retry_for: float) -> Iterator[LoadProgress]:
        self._note("committed", load, list(parts))
        return iter(self.progress)

    def abort_load(self, load: str) -> None:
        self._note("aborted", load)


@pytest.fixture
def sow(monkeypatch: pytest.MonkeyPatch) -> Sow:
    client = Sow()

    @contextmanager
    def connect(_connecting: Connecting) -> Iterator[Sow]:
        yield client

    for module in (writing, overwriting):
        monkeypatch.setattr(module, "connect", connect)
        monkeypatch.setattr(module, "require_whole_input", lambda: client.did.append("whole"))
        monkeypatch.setattr(
            module, "task_context", lambda: SimpleNamespace(partitionId=lambda: 3, taskAttemptId=lambda: 44)
        )
    return client


OPTIONS = Connecting(retry_for_micros=0)
ID = StructType().add("id", LongType())
CHANGES = StructType().add("_op", StringType()).add("id", LongType())


def batches(*ids: Sequence[int | None], **more: Sequence[object]) -> Iterator[pa.RecordBatch]:
    for some in ids:
        columns = {"id": pa.array(some, pa.int64())} | {name: pa.array(column) for name, column in more.items()}
        yield pa.RecordBatch.from_pydict(columns)


def changes(*pairs: tuple[str, int]) -> Iterator[pa.RecordBatch]:
    ops, ids = zip(*pairs, strict=True)
    yield from batches(ids, _op=ops)


def publishing(schema: StructType = ID, **options: Any) -> writing.PublishingWriter:
    return writing.PublishingWriter(Writing(OPTIONS, "orders", **options), schema)


# ---- appends ----


def test_a_partition_is_one_unit_of_a_publisher_of_the_job(sow: Sow) -> None:
    writer = publishing()
    assert writer.write(batches([1], [2, 3])) == Written(3, 3)
    (_, name, unit), publisher, *rest = sow.did
    assert name.startswith("spark-")
    assert name.endswith("-3")
    assert (unit, publisher) == (1, ("publisher", name, 5, 1))
    assert rest == [
        ("published", [b'{"id":1}', b'{"id":2}', b'{"id":3}'], None, None, None),
        "whole",  # before the unit is finished
        "finished",
        "left",
    ]


def test_a_large_partition_is_handed_over_in_pieces(sow: Sow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "ROWS_PER_REQUEST", 2)
    assert publishing().write(batches([1], [2, 3], [4])) == Written(3, 4)
    assert [step[1] for step in sow.did if step[0] == "published"] == [
        [b'{"id":1}', b'{"id":2}', b'{"id":3}'],
        [b'{"id":4}'],
    ]


def test_rows_that_remove_records_are_published_in_their_place(sow: Sow) -> None:
    """One ordered request. A delete of its own had to wait for the rows before it.

    Story: each run of puts or of removals was a request, so of a task that was killed in between some were applied, and
    the next attempt applied them once more.
    """
    sow.settings = TopicSettings()
    rows_ = [("put", 1), ("delete", 1), ("delete", 2), ("expire", 3), ("put", 4)]
    written = publishing(CHANGES, key_column="id").write(changes(*rows_))
    assert written == Written(3, 5)
    assert sow.did[2:] == [
        (
            "with removals",
            [b"{}", b"", b"", b"", b"{}"],
            ["1", "1", "2", "3", "4"],
            [False, True, True, True, False],
        ),
        "whole",
        "finished",
        "left",
    ]


def test_a_record_with_key_fields_is_removed_by_its_document(sow: Sow) -> None:
    assert publishing(CHANGES).write(changes(("delete", 7))).rows == 1
    assert ("with removals", [b'{"id":7}'], None, [True]) in sow.did


def test_a_removal_that_is_refused_is_a_bad_row(sow: Sow) -> None:
    sow.refuses = [Refusal(1, "KEY_FIELD_MISSING", "no key")]
    written = publishing(CHANGES, on_bad_row="drop").write(changes(("delete", 8), ("delete", 7)))
    assert (written.rows, written.bad) == (1, 1)
    assert written.samples == (BadRow(1, "KEY_FIELD_MISSING", "no key", '{"id":7}'),)


def test_removals_count_as_rows_of_a_finished_unit(sow: Sow) -> None:
    sow.unit = OpenedPublisher(epoch=5, unit_done=True, unit_records=2)
    assert publishing(CHANGES).write(changes(("put", 1), ("delete", 1))) == Written(3, 2, again=True)


def test_a_refused_row_fails_the_task_before_its_unit_is_finished(sow: Sow) -> None:
    sow.refuses = [REFUSED]
    with pytest.raises(SowSourceError) as caught:
        publishing().write(batches([1, 2]))
    assert caught.value.reason == "PAYLOAD_MALFORMED"
    assert 'row 1: no (PAYLOAD_MALFORMED), in {"id":2}' in caught.value.message
    assert not any("finished" in str(step) for step in sow.did)


def test_refused_rows_that_may_be_dropped_are_left_out_of_the_unit(sow: Sow) -> None:
    sow.refuses = [REFUSED]
    written = publishing(on_bad_row="drop").write(batches([1, 2]))
    assert (written.rows, written.bad) == (1, 1)
    assert sow.did[-2:] == ["finished without refused", "left"]


def test_a_unit_with_refused_rows_that_nobody_has_seen_is_not_finished(sow: Sow) -> None:
    """given refusals that come with the end of the unit only / then the task fails with them"""
    sow.refuses = [Refusal(9, "TOPIC_FULL", "no room")]
    with pytest.raises(SowSourceError, match="TOPIC_FULL"):
        publishing().write(batches([1]))


@pytest.mark.parametrize(
    ("reason", "said"),
    [("PUBLISHER_FENCED", "a newer attempt of this task has taken over"), ("OVERLOADED", "no")],
)
def test_an_attempt_that_was_fenced_says_so(sow: Sow, reason: str, said: str) -> None:
    sow.fails["publisher"] = InvalidArgument("no", reason=reason)
    with pytest.raises(SowSourceError) as caught:
        publishing().write(batches([1]))
    assert caught.value.reason == reason
    assert said in caught.value.message


def test_a_unit_that_an_earlier_attempt_has_finished_is_not_written_again(
    sow: Sow, caplog: pytest.LogCaptureFixture
) -> None:
    sow.unit = OpenedPublisher(epoch=5, unit_done=True, unit_records=2)
    assert publishing().write(batches([1], [2])) == Written(3, 2, again=True)
    sow.unit = OpenedPublisher(epoch=5, unit_done=True, unit_records=0)
    assert publishing(on_bad_row="drop").write(batches([1])) == Written(3, 1, again=True)
    assert "with an unknown number of rows; 1 rows are not written again" in caplog.text
    with pytest.raises(SowSourceError, match="with no row, or long ago, and now has 1"):
        publishing().write(batches([1]))
    assert not any(step[0] == "published" for step in sow.did)


def test_the_figures_of_a_job_are_logged(sow: Sow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bad = BadRow(4, "KEY_REQUIRED", "no key", "")
    publishing().commit([Written(0, 5), None, Written(2, 6, 1, (bad,))])
    assert "write of orders: 11 rows in 2 of 3 partitions, 1 bad rows" in caplog.text
    assert "1 bad rows were dropped, such as row 4: no key (KEY_REQUIRED)" in caplog.text


def test_an_aborted_job_ends_the_attempts_that_may_still_run(sow: Sow, caplog: pytest.LogCaptureFixture) -> None:
    publishing().abort([None, Written(1, 5)])
    names = [step[1] for step in sow.did if step[0] == "opened"]
    assert [name[-2:] for name in names] == ["-0", "-1"]
    sow.fails["opened"] = Unavailable("gone", reason="UNREACHABLE")
    publishing().abort([None])
    assert "the publishers of an aborted write to orders were not fenced: gone" in caplog.text


def test_a_topic_that_a_write_creates_needs_rows_with_keys(sow: Sow) -> None:
    sow.fails["described"] = NotFound("no topic", reason="TOPIC_NOT_FOUND")
    assert publishing(key_column="id").write(batches([1])).rows == 1
    with pytest.raises(SowSourceError, match="TOPIC_NOT_FOUND"):
        publishing()


def test_writing_outside_of_a_task_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="write is called in tasks only"):
        writing.task_context()


# ---- overwrites ----


def test_never_is_left_out_where_a_topic_rejects_lifetimes(sow: Sow) -> None:
    """L3. A state with `expiration="reject"` left it out everywhere: a topic with a default lifetime gave it that."""
    for expiration, lifetime in (("reject", None), ("1h", NEVER), ("enabled", NEVER)):
        sow.settings, sow.lifetimes = TopicSettings(key=("/id",), expiration=expiration), []
        publishing(ttl="never").write(batches([1]))
        overwriting_with(ttl="never").write(batches([1]))
        assert sow.lifetimes == [lifetime, lifetime]


def overwriting_with(schema: StructType = ID, **options: Any) -> overwriting.OverwritingWriter:
    return overwriting.OverwritingWriter(Writing(OPTIONS, "orders", **options), schema)


def test_a_partition_is_staged_for_the_load_of_the_job(sow: Sow) -> None:
    writer = overwriting_with(ttl="1h", lease_micros=60_000_000)
    assert sow.did == [("load", timedelta(minutes=1))]
    staged = writer.write(batches([1], [2, 3]))
    assert staged == overwriting.Staged(3, 3, attempt=44)
    assert sow.did[1:] == [
        ("stage", "load-1", 3, 44),
        ("staged", [b'{"id":1}'], None, None, None),
        ("staged", [b'{"id":2}', b'{"id":3}'], None, None, None),
        "whole",  # before the rows are said to be staged
        "flushed",
        "left",
    ]
    assert sow.lifetimes == ["1h", "1h"]


def test_a_row_that_the_load_refuses_fails_the_task_or_is_dropped(sow: Sow) -> None:
    sow.refuses = [REFUSED]
    with pytest.raises(SowSourceError, match=r'row 1: no \(PAYLOAD_MALFORMED\), in {"id":2}'):
        overwriting_with().write(batches([1, 2], [3]))
    staged = overwriting_with(on_bad_row="drop").write(batches([1, 2], [3]))
    assert (staged.rows, staged.bad, staged.attempt) == (2, 1, 44)


def test_a_row_that_is_refused_with_the_last_answer_fails_its_task(sow: Sow) -> None:
    sow.refuses_late = [REFUSED]
    with pytest.raises(SowSourceError, match=r'row 1: no \(PAYLOAD_MALFORMED\), in {"id":2}'):
        overwriting_with().write(batches([1, 2]))


def test_a_load_is_committed_with_the_attempts_that_count(sow: Sow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    step = overwriting.PROGRESS_LOGGED_ROWS
    sow.progress = [
        LoadProgress("applying", LoadFigures(3 * step, applied, 0, 0, 0)) for applied in (1, step, step + 1, 2 * step)
    ] + [LoadProgress("done", LoadFigures(3 * step, 3 * step, 1, 2, 3))]
    overwriting_with().commit([overwriting.Staged(0, 5, attempt=7), overwriting.Staged(1, 6, attempt=9)])
    assert sow.did[-1] == ("committed", "load-1", [LoadPart(0, 7, 5), LoadPart(1, 9, 6)])
    told = [line for line in caplog.messages if line.startswith("overwrite of orders: ") and "applied" in line]
    assert [line.split(";")[1].split(" of")[0] for line in told] == [f" {step * number}" for number in (1, 2, 3)]
    assert told[-1].endswith("1 superseded, 2 repeated, 3 records deleted")


def test_without_the_word_of_each_task_nothing_is_replaced(sow: Sow) -> None:
    with pytest.raises(SowSourceError, match="INPUT_CUT: partitions 1 of 2 did not report"):
        overwriting_with().commit([overwriting.Staged(0, 5), None])
    assert sow.did == [("load", None)]


def test_the_rows_of_a_failed_job_go_with_its_load(sow: Sow, caplog: pytest.LogCaptureFixture) -> None:
    overwriting_with().abort([])
    assert sow.did[-1] == ("aborted", "load-1")
    sow.fails["aborted"] = InvalidArgument("it is committed", reason="LOAD_COMMITTED")
    overwriting_with().abort([])
    assert "load load-1 of orders was not aborted: it is committed" in caplog.text


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [(ID, {"mode": "delta"}, "delta and overwrite exclude each other"), (CHANGES, {}, "an overwrite takes records")],
)
def test_an_overwrite_that_makes_no_sense_opens_no_load(
    sow: Sow, schema: StructType, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(SowSourceError, match=said):
        overwriting_with(schema, **options)
    assert sow.did == []


def test_the_lease_of_a_load_is_renewed_until_the_load_is_gone(sow: Sow, caplog: pytest.LogCaptureFixture) -> None:
    """given tasks that get no rows for long / then a renewal that fails is logged, and the next one comes"""
    gone = threading.Event()
    renewals: list[str] = []

    def renew_load(load: str) -> None:
        renewals.append(load)
        if len(renewals) == 1:
            raise Unavailable("away", reason="UNREACHABLE")
        if len(renewals) == 3:
            gone.set()
            raise NotFound("no load", reason="LOAD_NOT_FOUND")

    writer = overwriting_with()
    writer._lease = timedelta(0)
    with writer._renewed(SimpleNamespace(renew_load=renew_load)):  # type: ignore[arg-type]  # a part of a client
        assert gone.wait(60)
    assert renewals == ["load-1"] * 3
    assert "load load-1 was not renewed: away" in caplog.text


# ---- bad rows ----


def test_the_first_bad_rows_of_two_batches_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SAMPLES_MAX", 3)
    bad = writing.BadRows()
    for number in range(3):
        bad.add([BadRow(2 * number + more, "KEY_REQUIRED", "", "") for more in range(2)])
    assert (bad.count, [one.row for one in bad.samples]) == (6, [0, 1, 2])


def test_a_task_with_many_bad_rows_ends_early(sow: Sow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "BAD_ROWS_MAX", 2)
    sow.settings = TopicSettings()
    with pytest.raises(SowSourceError, match="2 or more rows of partition 3 cannot be written to orders"):
        publishing(key_column="id").write(batches([1, None], [None], [4]))
    assert not [step for step in sow.did if step[0] == "published"]


def test_a_refused_row_is_found_among_those_handed_over() -> None:
    handed = writing.HandedOver()
    for first in (0, 2):
        payloads = [b"%d" % (first + more) for more in range(2)]
        handed.add(rows.Puts(range(10 + first, 12 + first), payloads, None, None, None))
    late = Refusal(3, "KEY_REQUIRED", "no")
    assert [(one.row, one.value) for one in handed.refused([late, Refusal(7, "KEY_REQUIRED", "no")])] == [(13, "3")]
    handed.settled(2)
    assert handed.refused([Refusal(1, "KEY_REQUIRED", "no")]) == [], "it was settled before"
    handed.settled(4)
    assert handed.refused([late]) == []
