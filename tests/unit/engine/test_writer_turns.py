"""The writer takes turns by caller, and a commit has a bounded work (rule N7, queue [3] to [5], work [1] to [3])."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from sow_server.engine.commit import first_publish
from sow_server.engine.commit.mutations import stage_job
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.queue import QueuedStep
from sow_server.engine.commit.requests import Job, RequestLimits, Slice, prepare
from sow_server.engine.commit.work import MERGE_BYTE
from sow_server.engine.commit.writer import ASIDE_MAX
from sow_server.engine.disk.rocks import COMMITS
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import decode_commit
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    Outcome,
    Publish,
    PublishChannel,
    PublisherPosition,
    Request,
    TopicSettings,
    Touch,
)
from sow_server.engine.values.policies import declared_of
from sow_server.engine.values.turns import SERVER
from tests.support.fakes.callers import working_for
from tests.support.stores.stores import SECOND, Rig

LIMITS: Final = RequestLimits(payload_bytes_max=100_000)
OPTIONS: Final = WriterOptions(queue_shared=True, commit_records_max=10, limits=LIMITS)
JSON: Final = TopicSettings(key=("/id",), expiration=Expiration.ENABLED)


class Callers:
    """Requests of several callers, and the commits that answer them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.answers: dict[str, list[Outcome | StoreError]] = {}

    def asks(self, caller: str, *requests: Request) -> None:
        with working_for(caller):
            for request in requests:
                self.rig.store.commits.submit(request).then(self.answers.setdefault(caller, []).append)

    def commits_until(self, caller: str, answers: int = 1) -> int:
        """The writer's turns until a caller has so many answers."""
        turns = 0
        while len(self.answers[caller]) < answers:
            self.rig.turn()
            turns += 1
            assert turns < 1000
        return turns

    def reasons(self, caller: str) -> list[Reason | None]:
        return [answer.reason if isinstance(answer, StoreError) else None for answer in self.answers[caller]]


def rig_of(path: Path, **more: object) -> Rig:
    writer: WriterOptions = replace(OPTIONS, **more)  # type: ignore[arg-type]  # fields of the options
    rig = Rig(path, options=StoreOptions(writer=writer))
    rig.create_topic("orders")
    rig.create_topic("quotes", JSON)
    return rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = rig_of(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def callers(rig: Rig) -> Callers:
    return Callers(rig)


def put(*keys: str, payload: bytes = b"x", atomic: bool = False, channel: PublishChannel | None = None) -> Publish:
    return Publish("orders", [payload] * len(keys), list(keys), atomic=atomic, channel=channel)


def many(count: int, prefix: str = "k") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def deltas(*documents: object, unset: Sequence[str] = ()) -> Publish:
    return Publish("quotes", [json.dumps(one).encode() for one in documents], delta=True, unset_paths=unset)


def commit_sizes(rig: Rig) -> list[int]:
    """How many changes each commit has."""
    commits = [decode_commit(key, value) for key, value in rig.rows(COMMITS)]
    return [commit.last_sequence - commit.first_sequence + 1 for commit in commits]


# --- turns -----------------------------------------------------------------------------------------------------------


def heavy_requests() -> dict[str, list[Request]]:
    return {
        "one request of many commits": [put(*many(1000))],
        "requests that fill a commit each": [put(*many(10, f"{number}-")) for number in range(50)],
        "requests of nearly a commit": [put(*many(7, f"{number}-")) for number in range(50)],
        "single records": [put(key) for key in many(500)],
        "atomic requests": [put(f"{number}-a", f"{number}-b", atomic=True) for number in range(50)],
        "deletes": [Delete("orders", many(10, f"{number}-")) for number in range(50)],
        "touches": [Touch("orders", many(10, f"{number}-")) for number in range(50)],
        "refused requests": [Publish("no topic", [b"x"], ["k"]) for _ in range(50)],
        "deltas": [deltas(*[{"id": "1", "n": number} for number in range(300)])],
    }


@pytest.mark.parametrize("kind", heavy_requests())
@pytest.mark.parametrize("under_way", [0, 3])
def test_others_wait_for_one_commit_of_a_caller_with_many_requests(callers: Callers, kind: str, under_way: int) -> None:
    """N7. Story: 300 deltas on a record of 1 MB, in one stream, made the publishes of all others wait for 82 s."""
    callers.asks("heavy", *heavy_requests()[kind])
    for _ in range(under_way):
        callers.rig.turn()
    for number in range(3):
        callers.asks("light", put(f"light-{number}"))
        assert callers.commits_until("light", number + 1) <= 2, "one commit of the other, and the own"
    callers.rig.store.writer.step()
    assert len(callers.answers["heavy"]) == len(heavy_requests()[kind])


def test_steps_of_a_caller_take_turns_too(callers: Callers) -> None:
    done: list[object] = []
    with working_for("heavy"):
        for _ in range(50):
            callers.rig.store.commits.barrier().then(done.append)
    callers.asks("light", put("a"))
    assert callers.commits_until("light") <= 2
    assert len(done) <= 1
    with working_for("other"):
        callers.rig.store.commits.barrier().then(lambda _: callers.asks("light", put("b")))
    assert callers.commits_until("light", 2) <= 6, "the step of the third has its turn as well"


def test_two_callers_with_much_work_alternate(callers: Callers) -> None:
    callers.asks("a", *[put(*many(10, f"a{number}-")) for number in range(20)])
    callers.asks("b", *[put(*many(10, f"b{number}-")) for number in range(20)])
    served = []
    while len(callers.answers["a"]) < 20:
        before = {caller: len(answers) for caller, answers in callers.answers.items()}
        callers.rig.turn()
        served += [caller for caller, answers in callers.answers.items() if len(answers) > before[caller]]
    assert served[:20] == ["a", "b"] * 10


def test_a_caller_whose_request_did_not_fit_begins_the_next_commit(callers: Callers) -> None:
    """queue [4]. Otherwise single records of others, each cheaper than it, would always come first."""
    callers.asks("large", put(*many(10)))
    callers.asks("single", put("a"))
    callers.rig.turn()
    for number in range(20):
        callers.asks("single", put(f"s{number}"), put(f"t{number}"))
        if number == 0:
            callers.asks("large", put(*many(10, "second-")))
        callers.rig.turn()
        if len(callers.answers["large"]) == 2:
            break
    assert number <= 2


def test_a_commit_does_not_wait_until_every_caller_has_been_asked(
    callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: with requests of 1,000 callers, all of them were prepared, and looked at again before each commit."""
    prepared: list[Job] = []

    def counted(job: Job, *arguments: Any) -> None:
        prepared.append(job)
        prepare(job, *arguments)

    monkeypatch.setattr("sow_server.engine.commit.writer.prepare", counted)
    for number in range(200):
        callers.asks(f"caller {number}", put(*many(6, f"{number}-")))
    callers.rig.turn()
    assert callers.reasons("caller 0") == [None]
    assert len(prepared) == 1 + ASIDE_MAX
    callers.rig.store.writer.step()
    assert all(reason is None for caller in callers.answers for reason in callers.reasons(caller))


def test_whoever_comes_during_a_commit_of_another_has_the_next_turn(callers: Callers) -> None:
    """The turns forget what callers had once nobody waits, but the commit that is under way still counts."""
    callers.asks("heavy", put(*many(10)))
    writer = callers.rig.store.writer
    commit = writer._commit_jobs

    def arriving(*arguments: object) -> None:
        writer._commit_jobs = commit  # type: ignore[method-assign]  # a spy
        callers.asks("heavy", put(*many(10, "again-")))  # it comes first
        callers.asks("light", put("a"))
        commit(*arguments)  # type: ignore[arg-type]  # as they came

    writer._commit_jobs = arriving  # type: ignore[method-assign,assignment]  # a spy
    callers.rig.turn()
    callers.rig.turn()
    assert len(callers.answers["light"]) == 1
    assert len(callers.answers["heavy"]) == 1


def test_callers_share_a_commit_and_its_sync(callers: Callers) -> None:
    """P5: group commit."""
    for caller in "abcde":
        callers.asks(caller, put(caller))
    assert callers.commits_until("e") == 1
    assert commit_sizes(callers.rig) == [5]
    assert all(len(answers) == 1 for answers in callers.answers.values())


def test_the_requests_of_a_stream_keep_their_order_beside_those_of_others(callers: Callers) -> None:
    """P7."""
    for number in range(30):
        callers.asks("a", put("same", payload=b"%d" % number))
        callers.asks("b", put(f"b{number}"), put(*many(6, f"b{number}-")))
    callers.rig.store.writer.step()
    values = [int(entry.payload) for entry in callers.rig.journal("orders") if entry.key == b"same"]
    assert values == list(range(30))


def test_nothing_of_a_stream_overtakes_a_refused_request_of_it(callers: Callers) -> None:
    """P6, P7: also where they would share a commit with requests of others."""
    channel = PublishChannel()
    fenced = put("b", channel=channel)
    fenced.publisher = PublisherPosition("p", 1, 1)
    callers.rig.run(replace(put("x"), publisher=PublisherPosition("p", 2, 1)))
    callers.asks("a", put("a", channel=channel), fenced, put("c", channel=channel))
    callers.asks("b", put("d"))
    assert callers.commits_until("a", 3) == 1
    assert callers.reasons("a") == [Reason.PUBLISHER_FENCED, Reason.STREAM_BROKEN, None]
    assert sorted(callers.rig.live("orders")) == [b"a", b"d", b"x"]


def test_a_request_that_is_refused_when_it_is_staged_costs_the_others_no_commit(callers: Callers) -> None:
    """Story: with one refused request among a thousand, each of the thousand got a commit and a sync of its own."""
    callers.rig.run(replace(put("x"), publisher=PublisherPosition("p", 2, 1)))
    for number in range(4):
        callers.asks(f"good {number}", put(f"k{number}"))
        callers.asks("bad", replace(put("y"), publisher=PublisherPosition("p", 1, 1)))
    callers.rig.turn()
    assert callers.reasons("bad") == [Reason.PUBLISHER_FENCED] * 4
    assert all(callers.reasons(f"good {number}") == [None] for number in range(4))
    assert commit_sizes(callers.rig) == [1, 4]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_refusal_that_is_remembered_is_a_turn_of_its_caller(
    tmp_path: Path, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N7, P4. Story: one commit and sync for each refused request of a stream, and all of them in one turn: the
    publishes of others waited for 100 syncs."""
    rig = Rig(tmp_path, options=StoreOptions(writer=OPTIONS, dynamic_topics=dynamic))
    rig.create_topic("orders")
    callers, channel, writes = Callers(rig), PublishChannel(), []
    write = rig.store.writer.committer.write

    def counted(*arguments: Any, **more: Any) -> StoreError | None:
        writes.append(arguments)
        return write(*arguments, **more)

    monkeypatch.setattr(rig.store.writer.committer, "write", counted)
    nowhere = Publish("nowhere", [b"not json"], ["k"], channel=channel)
    callers.asks("heavy", *[replace(nowhere) for _ in range(100)])
    for number in range(3):
        callers.asks("light", put(f"light-{number}"))
        before = len(writes)
        callers.commits_until("light", number + 1)
        assert len(writes) - before <= 2, "one commit of the other, and the own"
    rig.store.writer.step()
    assert len(callers.answers["heavy"]) == 100
    rig.close()


def test_publishes_to_a_full_topic_give_up_no_commit_for_a_sweep_that_is_paused(tmp_path: Path) -> None:
    """N7, T6, L15. Story: each of them gave up the commit that it was in, with what others had in it, although nothing
    could be swept. So others waited as long as new ones came."""
    rig = rig_of(tmp_path, commit_records_max=1000)
    rig.create_topic("full", JSON._replace(key=(), max_records=1))
    rig.run(Publish("full", [b"{}"], ["k"]))
    rig.run(Publish("quotes", [b'{"id":"1"}'], lifetime=Lifetime(LifetimeKind.TTL, SECOND)))
    rig.time.tick(SECOND)
    rig.time.step_wall(60 * SECOND)
    callers, more = Callers(rig), Publish("full", [b"{}"], ["more"])
    callers.asks("heavy", *[replace(more) for _ in range(30)])
    callers.asks("light", put("a"))
    assert callers.commits_until("light") == 1
    assert callers.commits_until("heavy", 30) <= 1
    assert all(
        isinstance(one, Outcome) and one.refusals[0].reason is Reason.TOPIC_FULL for one in callers.answers["heavy"]
    )
    rig.close()


def test_what_the_server_does_for_several_is_nobodys_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """queue [3]: changes of durables keep one order, whoever asks for them; a change in rounds stays its caller's."""
    queued: list[str] = []
    submit = rig.store.writer.queue.submit

    def noted(item: Job | QueuedStep) -> None:
        queued.append(item.caller)
        submit(item)

    monkeypatch.setattr(rig.store.commits, "_submit", noted)
    with working_for("someone"):
        rig.store.durable_commits.change(lambda durables: None)
        rig.store.beats.make()
        rig.store.commits.barrier()
        rig.store.administration.alter_topic("orders", lambda declared: declared)
    rig.store.writer.step()
    assert queued == [SERVER, SERVER, "someone", "someone"]


# --- between two parts of a request ----------------------------------------------------------------------------------


def test_the_rest_of_a_request_is_refused_once_its_topic_is_gone(callers: Callers) -> None:
    rig = callers.rig
    callers.asks("a", put(*many(25)))
    rig.turn()
    done: list[object] = []
    with working_for("b"):
        rig.store.administration.delete_topic("orders", force=True).then(done.append)
        rig.store.administration.create_topic("orders", declared_of(rig.topic("orders").settings)).then(done.append)
    rig.store.writer.step()
    (answer,) = callers.answers["a"]
    assert isinstance(answer, StoreError)
    assert (answer.reason, answer.applied) == (Reason.TOPIC_NOT_FOUND, 10)
    assert rig.count("orders") == 0


def test_a_request_whose_topic_goes_while_it_waits_creates_it_in_a_turn_of_its_own(tmp_path: Path) -> None:
    """Story: its keys were known, so the topic was created in the middle of a commit of others, between their look-ups
    and their write. Whether it is created may depend on their outcome."""
    rig = Rig(tmp_path, options=StoreOptions(writer=OPTIONS, dynamic_topics=True))
    rig.create_topic("orders")
    rig.create_topic("gone")
    callers = Callers(rig)
    callers.asks("a", put(*many(8)))
    done: list[object] = []
    with working_for("b"):
        rig.store.administration.delete_topic("gone", force=True).then(done.append)
    callers.asks("c", put(*many(7)))
    callers.asks("d", Publish("gone", [b"{}"] * 3, many(3)))
    callers.commits_until("c")
    assert done == [0]
    assert not callers.answers["d"], "it does not share the commit of c"
    assert "gone" not in rig.store.topics.by_name
    callers.commits_until("d")
    assert callers.reasons("d") == [None]
    assert rig.count("gone") == 3
    rig.close()


def test_the_rest_of_a_request_has_the_keys_of_the_settings_that_are_in_force(callers: Callers) -> None:
    rig = callers.rig
    documents = [json.dumps({"id": f"i{number}", "other": f"o{number}"}).encode() for number in range(15)]
    callers.asks("a", Publish("quotes", documents))
    rig.turn()
    callers.asks("b", Delete("quotes", [f"i{number}" for number in range(10)]))
    callers.commits_until("b")
    done: list[object] = []
    with working_for("c"):
        rig.store.administration.alter_topic("quotes", lambda declared: {**declared, "key": ("/other",)}).then(
            done.append
        )
    rig.store.writer.step()
    assert not any(isinstance(answer, StoreError) for answer in done)
    (answer,) = callers.answers["a"]
    assert isinstance(answer, Outcome)
    assert answer.applied == 15
    assert sorted(rig.live("quotes")) == sorted(f"o{number}".encode() for number in range(10, 15))


# --- the work of a commit --------------------------------------------------------------------------------------------


def test_a_commit_takes_as_many_deltas_as_its_work_allows(tmp_path: Path) -> None:
    """work [2]"""
    rig = rig_of(tmp_path, commit_records_max=1000, commit_work_micros=int(25_000 * MERGE_BYTE))
    rig.run(Publish("quotes", [json.dumps({"id": "1", "text": "x" * 9_900}).encode()]))
    callers = Callers(rig)
    callers.asks("a", deltas(*[{"id": "1", "n": number} for number in range(10)]))
    assert callers.commits_until("a") == 5
    rig.close()


def test_a_record_that_grows_in_the_request_counts_as_it_is_by_then(tmp_path: Path) -> None:
    """Story: before a request its records were small, or not there, so all its deltas went into one commit. Each wrote
    what the ones before it had made: 1,000 times 1 MB."""
    rig = rig_of(tmp_path, commit_records_max=1000, commit_work_micros=int(50_000 * MERGE_BYTE))
    callers = Callers(rig)
    large = {"id": "1", "text": "x" * 50_000}
    callers.asks("a", deltas(large, *[{"id": "1", "n": number} for number in range(9)]))
    callers.asks("a", *[deltas({"id": "1", "m": number}) for number in range(5)])
    assert callers.commits_until("a", 1) == 9
    assert callers.commits_until("a", 6) == 5
    assert json.loads(rig.live("quotes")[b"1"].payload) == {**large, "n": 8, "m": 4}
    rig.close()


def test_the_first_publish_to_a_topic_is_tried_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the trial of a first publish merged all of it, however large its records had become."""
    options = replace(OPTIONS, commit_records_max=1000, commit_work_micros=int(50_000 * MERGE_BYTE))
    rig = Rig(tmp_path, options=StoreOptions(writer=options, dynamic_topics=True))
    tried: list[int] = []

    def counted(*arguments: Any) -> Slice:
        part = stage_job(*arguments)
        tried.append(part.count)
        return part

    monkeypatch.setattr(first_publish, "stage_job", counted)
    callers = Callers(rig)
    documents = [{"text": "x" * 50_000}, *[{"n": number} for number in range(9)]]
    request = deltas(*documents)
    request.topic, request.keys = "new", ["1"] * 10
    callers.asks("a", request)
    assert callers.commits_until("a") == 9
    assert tried == [2]
    assert callers.reasons("a") == [None]
    rig.close()


def test_an_atomic_request_whose_records_grow_beyond_a_commit_is_refused(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, commit_merged_bytes_max=100_000)
    callers = Callers(rig)
    request = deltas({"id": "1", "text": "x" * 50_000}, *[{"id": "1", "n": number} for number in range(4)])
    request.atomic = True
    callers.asks("a", request)
    callers.commits_until("a")
    assert callers.reasons("a") == [Reason.ATOMIC_TOO_LARGE]
    assert rig.count("quotes") == 0
    rig.close()


def test_a_retry_of_an_atomic_request_has_its_answer_although_its_records_have_grown(tmp_path: Path) -> None:
    """P6. Story: after the request its records were beyond the limit, so its retry was refused as too large, and the
    publisher took it for one that had not been applied."""
    rig = rig_of(tmp_path, commit_merged_bytes_max=100_000)
    rig.run(Publish("quotes", [json.dumps({"id": f"{number}", "t": "x" * 9_000}).encode() for number in range(10)]))
    callers = Callers(rig)
    for _ in range(2):
        request = deltas(*[{"id": f"{number}", "u": "y" * 3_000} for number in range(10)])
        request.atomic, request.publisher = True, PublisherPosition("p", 1, 1)
        callers.asks("a", request)
        rig.store.writer.step()
    first, retried = callers.answers["a"]
    assert isinstance(first, Outcome)
    assert isinstance(retried, Outcome)
    assert (first.applied, retried.applied, retried.duplicates) == (10, 0, 10)
    assert rig.store.commits.queue_depth == (0, 0)
    rig.close()


def test_an_atomic_touch_of_more_bytes_than_a_commit_is_refused(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, commit_records_max=1000, commit_merged_bytes_max=1_000_000)
    callers = Callers(rig)
    callers.asks("a", put(*many(20), payload=b"x" * 100_000))
    callers.asks("a", Touch("orders", many(20), atomic=True), Touch("orders", many(9), atomic=True))
    rig.store.writer.step()
    assert callers.reasons("a") == [None, Reason.ATOMIC_TOO_LARGE, None]
    rig.close()


def test_paths_to_unset_are_work_in_each_record(tmp_path: Path) -> None:
    """Story: 10,000 deltas with 1,000 paths to unset each made others wait for 5 s."""
    rig = rig_of(tmp_path, commit_records_max=1000)
    callers = Callers(rig)
    unset = [f"/f{number}" for number in range(1000)]
    callers.asks("a", deltas(*[{"id": str(number)} for number in range(200)], unset=unset))
    assert callers.commits_until("a") == 6
    rig.close()


def test_large_payloads_are_split_over_commits_and_small_ones_are_not(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, commit_records_max=1000)
    callers = Callers(rig)
    callers.asks("a", put(*many(1000), payload=b"x" * 1000))
    assert callers.commits_until("a") == 1
    callers.asks("a", put(*many(150), payload=b"x" * 100_000))
    assert callers.commits_until("a", 2) == 2
    rig.close()


def test_touches_of_large_records_are_split_and_deletes_are_not(tmp_path: Path) -> None:
    """work [3], D2: up to the size of a commit a delete is atomic."""
    rig = rig_of(tmp_path, commit_records_max=1000, commit_work_micros=2000, commit_merged_bytes_max=5_000_000)
    callers = Callers(rig)
    callers.asks("a", put(*many(40), payload=b"x" * 100_000))
    callers.rig.store.writer.step()
    callers.asks("a", Touch("orders", many(40), Lifetime(LifetimeKind.TTL, SECOND)))
    assert callers.commits_until("a", 2) >= 3
    callers.asks("b", put("first"))
    callers.asks("a", Delete("orders", many(40)))
    assert callers.commits_until("a", 3) == 2, "it began a commit of its own"
    assert rig.count("orders") == 1
    rig.close()


def test_a_delete_of_more_bytes_than_a_commit_takes_several(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, commit_records_max=1000, commit_merged_bytes_max=1_000_000)
    callers = Callers(rig)
    callers.asks("a", put(*many(40), payload=b"x" * 100_000))
    callers.rig.store.writer.step()
    callers.asks("a", Delete("orders", many(40)))
    assert callers.commits_until("a", 2) == 4
    rig.close()


def test_heads_for_the_estimate_are_looked_up_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """work [3]. Story: one look-up for a thousand records of 1 MB read 1 GB into memory, of which 32 MiB was merged."""
    rig = rig_of(tmp_path, commit_records_max=1000, commit_merged_bytes_max=1_000_000)
    callers = Callers(rig)
    callers.asks("a", put(*many(400), payload=b"x" * 20_000))
    rig.store.writer.step()
    rig.reopen()  # no head is in the cache
    reads: list[int] = []
    multi_get = rig.store._rocks.multi_get

    def counted(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        reads.append(len(keys))
        return multi_get(family, list(keys))

    monkeypatch.setattr(rig.store._rocks, "multi_get", counted)
    callers.asks("a", Touch("orders", many(400)))
    rig.turn()
    assert max(reads) <= 64
    rig.close()


# --- the bounds of the queue -----------------------------------------------------------------------------------------


def refused(submit: Callable[[], object]) -> str:
    with pytest.raises(StoreError) as caught:
        submit()
    assert caught.value.reason is Reason.OVERLOADED
    return caught.value.message


def test_a_caller_leaves_as_much_of_the_queue_free_as_it_holds(tmp_path: Path) -> None:
    """queue [5]. Story: one identity filled the queue, and all others were refused as OVERLOADED."""
    rig = rig_of(tmp_path, queue_requests_max=12, queue_bytes_max=100)
    callers = Callers(rig)
    callers.asks("a", *[put(key) for key in many(6)])
    assert "share" in refused(lambda: callers.asks("a", put("one more")))
    callers.asks("b", *[put(key) for key in many(3)])
    assert "share" in refused(lambda: callers.asks("b", put("one more")))
    callers.asks("c", put("c"))
    callers.asks(SERVER, put("d"))
    callers.asks(SERVER, put("e"))
    assert "full" in refused(lambda: callers.asks("d", put("one more")))
    rig.store.writer.step()
    callers.asks("a", *[put(key) for key in many(6)])
    rig.store.writer.step()
    assert rig.store.writer.queue.depth == (0, 0)
    assert not rig.store.writer.queue._held
    rig.close()


def test_the_bytes_of_a_caller_leave_as_much_free(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, queue_bytes_max=100)
    callers = Callers(rig)
    callers.asks("a", put("a", payload=b"x" * 30), put("b", payload=b"x" * 20))
    assert "share" in refused(lambda: callers.asks("a", put("c")))
    callers.asks("b", put("large", payload=b"x" * 50))
    rig.store.writer.step()
    callers.asks("a", put("any size", payload=b"x" * 1000))
    rig.store.writer.step()
    assert callers.reasons("a") == [None] * 3
    rig.close()


def test_a_caller_may_fill_a_queue_that_is_not_shared(tmp_path: Path) -> None:
    """queue [5]. Story: without an access file all publishers of one host together had half of the queue."""
    rig = rig_of(tmp_path, queue_requests_max=4, queue_bytes_max=100, queue_shared=False)
    callers = Callers(rig)
    callers.asks("host", *[put(key, payload=b"x" * 20) for key in many(4)])
    assert "full" in refused(lambda: callers.asks("host", put("one more")))
    rig.store.writer.step()
    callers.asks("host", put("a", payload=b"x" * 40), put("b", payload=b"x" * 40))
    assert "full" in refused(lambda: callers.asks("host", put("c", payload=b"x" * 40)))
    rig.store.writer.step()
    assert rig.store.writer.queue.depth == (0, 0)
    rig.close()


def test_a_stop_comes_after_everything_that_was_queued(callers: Callers) -> None:
    callers.asks("a", put(*many(100)))
    callers.asks("b", *[put(key) for key in many(30, "b")])
    callers.rig.store.writer.stop()
    assert callers.reasons("a") == [None]
    assert callers.reasons("b") == [None] * 30


def test_after_a_failure_the_requests_of_all_callers_are_refused_once(callers: Callers) -> None:
    callers.asks("a", put(*many(100)))
    callers.asks("b", *[put(key) for key in many(30, "b")])
    callers.rig.turn()
    callers.rig.store.writer.fail(StoreError(Reason.STORE_FAILED, "damage"))
    callers.rig.store.writer.step()
    assert callers.reasons("a") == [Reason.STORE_FAILED]
    assert set(callers.reasons("b")) <= {None, Reason.STORE_FAILED}
    assert len(callers.answers["b"]) == 30
    assert callers.rig.store.writer.queue.depth == (0, 0)


# --- topics that move to another cell --------------------------------------------------------------------------------


def test_a_request_that_has_begun_goes_on_to_its_end_although_its_topic_moves(callers: Callers) -> None:
    """C2, C4. Story: a publish of 9000 records was refused with TOPIC_ELSEWHERE when 6000 of them were applied, and the
    client published all of them in the other cell."""
    moved = StoreError(Reason.TOPIC_ELSEWHERE, "orders lives in the cell b")
    commits = callers.rig.store.commits
    placed = {"orders": False}
    commits.refuse_elsewhere(lambda topic: moved if placed.get(topic) else None)
    callers.asks("begun", put(*many(35)))
    callers.asks("waits", put(*many(35, "w")))
    callers.rig.turn()
    placed["orders"] = True
    settled: list[object] = []
    with working_for("operator"):
        commits.moved().then(settled.append)
    callers.commits_until("waits")
    assert callers.reasons("waits") == [Reason.TOPIC_ELSEWHERE], "nothing of it is applied"
    while not settled:
        callers.rig.turn()
    (begun,) = callers.answers["begun"]
    assert isinstance(begun, Outcome)
    assert begun.applied == 35
    assert sum(commit_sizes(callers.rig)) == 35
