"""Instances that replicate, while processes, networks, disks and clocks fail (rules R1 to R12): real servers, real
connections, and proxies that cut, delay, stall and damage the traffic between them."""

from __future__ import annotations

import random
import resource
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest

from sow.v1 import replication_pb2, replication_pb2_grpc
from sow_client import Change, Client, DurabilityName, ReplicationUnavailable, SowError
from sow_replication.wire import opened, reason_name, refused_by, sealed
from tests.support.cluster import SLACK_MICROS, TOKEN, WAIT_SECONDS, Cluster, Instance
from tests.support.proxy import Proxy
from tests.support.server import reason_of, until

TOPICS: Final = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
retain_time = "2s"
[topics.kept]
retain_time = "2s"
"""
BOTH: Final = ("orders", "kept")
KEYS: Final = 40
CALL_SECONDS: Final = 5.0
REST_SECONDS: Final = 0.005
"""Between two writes of a load: the point is to fail in the middle of it, not to keep the machine busy."""
SECOND: Final = 1_000_000


class Load(threading.Thread):
    """Writes at one instance until it is told to stop: puts, deletes, touches, with lifetimes and without.

    Under shared keys all loads write, so of these it can only be said that all instances have to agree. Keys of its own
    nobody else writes: there it knows what has to be there. One whose last write was not answered is used no more.
    """

    def __init__(self, instance: Instance, draw: random.Random, *, replicated: bool = False) -> None:
        super().__init__(name=f"load at {instance.name}", daemon=True)
        self.instance: Final = instance
        self.acknowledged = 0
        self.refused: set[str] = set()
        """Reasons for which a write was not acknowledged."""
        self.expected: dict[str, set[int | None]] = {}
        """By key of its own: what may be there. None: nothing."""
        self._draw = draw
        self._replicated = replicated
        self._ending = threading.Event()
        self._number = 0
        self._names = [f"{instance.name}-{index}" for index in range(KEYS)]
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            with self.instance.server.client(timeout=CALL_SECONDS) as client:
                while not self._ending.wait(REST_SECONDS):
                    self._write(client)
        except BaseException as failure:
            self._failure = failure
            raise

    def end(self) -> None:
        """Returns once it has stopped."""
        self._ending.set()
        self.join(60)
        assert not self.is_alive()
        assert self._failure is None

    def await_more(self, count: int) -> None:
        """Waits until it has so many more writes acknowledged."""
        goal = self.acknowledged + count
        until(lambda: self.acknowledged >= goal or not self.is_alive(), WAIT_SECONDS, f"{count} writes: {self.name}")
        assert self.is_alive()

    def _write(self, client: Client) -> None:
        draw = self._draw
        self._number += 1
        place = draw.randrange(KEYS)
        own = draw.random() < 0.5
        key = self._names[place] if own else f"shared-{place}"
        may_be: set[int | None] = {self._number}
        action = draw.random()
        if action < 0.2:
            may_be = {None}
        elif action < 0.5:
            may_be.add(None)
        elif action < 0.6 and not own:
            may_be = set()
        try:
            self._act(client, key, action, own=own)
        except SowError as error:
            self.refused.add(error.reason or type(error).__name__)
            if own:
                self.expected[key] = self.expected.get(key, {None}) | may_be
                self._names[place] = f"{self.instance.name}-{place}-{self._number}"
            return
        self.acknowledged += 1
        if own:
            self.expected[key] = may_be

    def _act(self, client: Client, key: str, action: float, *, own: bool) -> None:
        durability: DurabilityName = "replicated" if self._replicated else "fsync"
        document = {"id": key, "n": self._number, "pad": "x" * self._draw.randrange(200)}
        if action < 0.2:
            client.sow_delete("orders", keys=[key], durability=durability)
        elif action < 0.5:
            lifetime = self._draw.choice(["300ms", "1s", "1h"])
            client.publish("orders", document, ttl=lifetime, durability=durability)
        elif action < 0.6 and not own:
            client.touch("orders", key, ttl="30s", durability=durability)
        else:
            client.publish("orders", document, durability=durability)

    def check(self, instance: Instance) -> None:
        """Holds that all that was acknowledged is at an instance."""
        there = {key: record.data["n"] for key, record in instance.records("orders").items()}  # type: ignore[index]  # a JSON object
        wrong = {key: (there.get(key), may_be) for key, may_be in self.expected.items() if there.get(key) not in may_be}
        assert not wrong, f"at {instance.name}: what is there, and what may be"


@contextmanager
def loads(cluster: Cluster, seed: int, *names: str, replicated: bool = False) -> Iterator[list[Load]]:
    """Writes at instances, all unless some are named; ends with the block."""
    chosen = names or tuple(cluster.instances)
    running = [Load(cluster[name], random.Random(f"{seed} {name}"), replicated=replicated) for name in chosen]
    for load in running:
        load.start()
    try:
        yield running
    finally:
        for load in running:
            load.end()


def settled(cluster: Cluster, running: list[Load]) -> None:
    """After a quiet time all are equal, and have what was acknowledged (rule R3)."""
    cluster.await_equal(topics=("orders",))
    for load in running:
        assert load.acknowledged
        for instance in cluster.instances.values():
            load.check(instance)
    assert not cluster.faults()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    """Two instances that send to each other."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS) as cluster:
        cluster.await_streaming()
        yield cluster


# --- processes -------------------------------------------------------------------------------------------------------


ONE_OF_TWO = ["a", pytest.param("b", marks=pytest.mark.long)]
"""Both take writes and both are sent to: the second one is worth its minute in the long run only."""


@pytest.mark.parametrize("victim", ONE_OF_TWO)
def test_an_instance_that_is_killed_under_load_goes_on_where_it_was(pair: Cluster, seed: int, victim: str) -> None:
    kill_again_and_again(pair, seed, victim, rounds=2)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["a", "b"])
def test_an_instance_that_is_killed_fifty_times_goes_on_where_it_was(pair: Cluster, seed: int, victim: str) -> None:
    kill_again_and_again(pair, seed, victim, rounds=50)


def kill_again_and_again(cluster: Cluster, seed: int, victim: str, rounds: int) -> None:
    (other,) = set(cluster.instances) - {victim}
    with loads(cluster, seed) as running:
        for _ in range(rounds):
            for load in running:
                load.await_more(50)
            cluster[victim].server.kill9()
            next(load for load in running if load.instance.name == other).await_more(100)
            cluster[victim].server.start()
        for load in running:
            load.await_more(50)
    settled(cluster, running)


@pytest.mark.parametrize("victim", ONE_OF_TWO)
def test_an_instance_that_is_stopped_under_load_catches_up_when_it_goes_on(
    pair: Cluster, seed: int, victim: str
) -> None:
    (other,) = set(pair.instances) - {victim}
    with loads(pair, seed) as running:
        for _ in range(3):
            for load in running:
                load.await_more(50)
            pair[victim].server.signal(signal.SIGSTOP)
            try:
                next(load for load in running if load.instance.name == other).await_more(100)
                pair.await_out(other, victim, lambda link: link.lag_sequences > 0)
            finally:
                pair[victim].server.signal(signal.SIGCONT)
        for load in running:
            load.await_more(50)
    settled(pair, running)


def test_replicated_writes_survive_the_loss_of_the_instance_that_accepted_them(tmp_path: Path, seed: int) -> None:
    """P5, R8; and the instance, once it is back without its data, gets all of it again."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS, mode="sync") as cluster:
        cluster.await_streaming()
        with loads(cluster, seed, "a", replicated=True) as running:
            running[0].await_more(300)
            cluster["a"].server.kill9()
        cluster["a"].wipe()
        running[0].check(cluster["b"])
        cluster["a"].server.start()
        settled(cluster, running)


# --- networks --------------------------------------------------------------------------------------------------------


def test_links_that_are_cut_in_the_middle_of_messages_go_on_where_they_were(pair: Cluster, seed: int) -> None:
    cut_again_and_again(pair, seed, rounds=12)


@pytest.mark.long
def test_links_that_are_cut_two_hundred_times_go_on_where_they_were(pair: Cluster, seed: int) -> None:
    cut_again_and_again(pair, seed, rounds=200)


def cut_again_and_again(cluster: Cluster, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    with loads(cluster, seed) as running:
        for _ in range(rounds):
            sender, receiver = draw.choice(cluster.links)
            proxy = cluster.proxies[sender, receiver]
            before = len(cluster[sender].server.events("link_closed"))
            proxy.cut_after(draw.randrange(1, 4000))
            until(
                lambda: len(cluster[sender].server.events("link_closed")) > before,  # noqa: B023  # of this round
                WAIT_SECONDS,
                "the link to be cut",
            )
            cluster.await_out(sender, receiver, lambda link: link.state == "streaming")
    settled(cluster, running)


def test_a_slow_network_delays_and_nothing_else(tmp_path: Path, seed: int) -> None:
    with Cluster(tmp_path, "a", "b", topics=TOPICS, mode="sync") as cluster:
        for proxy in cluster.proxies.values():
            proxy.delay(0.05)
        cluster.await_streaming()
        started = time.monotonic()
        cluster["a"].client.publish("kept", {"n": 1}, key="1", durability="replicated")
        assert time.monotonic() - started >= 0.1, "there and back"
        assert cluster["b"].client.get("kept", "1") is not None
        with loads(cluster, seed) as running:
            for load in running:
                load.await_more(150)
        settled(cluster, running)


def test_a_link_that_passes_nothing_is_given_up_and_comes_back(pair: Cluster, seed: int) -> None:
    """No end hears of it that the connection is dead: the silence tells them."""
    proxy = pair.proxies["a", "b"]
    with loads(pair, seed) as running:
        proxy.stall()
        given_up = pair.await_out("a", "b", lambda link: link.state not in ("streaming", "seeding"))
        assert given_up.last_error
        pair.await_in("b", "a", lambda link: link.state == "away" and link.last_error != "")
        assert pair["b"].out("a").state == "streaming", "the other direction goes on"
        proxy.mend()
        for load in running:
            load.await_more(50)
    settled(pair, running)


def test_damaged_bytes_are_never_applied_and_the_link_comes_back(pair: Cluster, seed: int) -> None:
    damage_again_and_again(pair, seed, rounds=8)


@pytest.mark.long
def test_two_hundred_damaged_bytes_are_never_applied(pair: Cluster, seed: int) -> None:
    damage_again_and_again(pair, seed, rounds=200)


def damage_again_and_again(cluster: Cluster, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    with loads(cluster, seed) as running:
        for _ in range(rounds):
            sender, receiver = draw.choice(cluster.links)
            proxy = cluster.proxies[sender, receiver]
            before = len(cluster[sender].server.events("link_closed"))
            # Behind what opens the connection: after a damaged token the next attempt takes half a minute.
            proxy.damage_after(draw.randrange(1500, 5000), 1 << draw.randrange(8))
            until(lambda: not proxy.armed, WAIT_SECONDS, "a byte to be damaged")  # noqa: B023  # of this round
            # It may be one that nobody reads, such as of a ping; or one that has the other end wait for more.
            passed = proxy.bytes_forward + 3000
            until(
                lambda: len(cluster[sender].server.events("link_closed")) > before or proxy.bytes_forward > passed,  # noqa: B023  # called before the loop goes on
                WAIT_SECONDS,
                "somebody to notice",
            )
            proxy.cut()
            cluster.await_out(sender, receiver, lambda link: link.state == "streaming")
    settled(cluster, running)


# --- clocks ----------------------------------------------------------------------------------------------------------


def test_beyond_the_allowed_skew_a_link_waits_and_skips_nothing_until_the_clocks_agree(
    tmp_path: Path,
) -> None:
    """K7: versions from the far future would win against everything for as long."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS, start=False) as cluster:
        ahead = 60 * SECOND
        cluster["a"].shift(ahead)
        cluster.start()
        cluster.await_streaming()
        cluster["b"].client.publish("kept", {"n": 1}, key="back")
        cluster["a"].client.publish("kept", {"n": 2}, key="ahead")
        out = cluster.await_out("a", "b", lambda link: link.last_error_reason == "CLOCK_SKEW")
        assert "max_clock_skew" in out.last_error
        incoming = cluster.await_in("b", "a", lambda link: link.last_error_reason == "CLOCK_SKEW")
        assert 50 < incoming.skew.total_seconds() < 70
        back = cluster.await_out("b", "a", lambda link: link.state == "streaming" and not link.lag_sequences)
        assert 50 < back.skew.total_seconds() < 70
        assert cluster["a"].client.get("kept", "back") is not None, "what is not ahead passes"
        assert cluster["b"].client.get("kept", "ahead") is None
        assert incoming.cursor < cluster["a"].client.replication_status().last_sequence

        cluster["b"].server.terminate()
        cluster["b"].shift(ahead)
        cluster.start("b")
        cluster.await_equal(topics=BOTH)
        assert cluster["b"].client.get("kept", "ahead") is not None
        assert not cluster.faults()


def test_a_link_continues_when_corrected_clocks_reach_the_time_of_its_changes(tmp_path: Path) -> None:
    with Cluster(tmp_path, "a", "b", topics=TOPICS, more='max_clock_skew = "1s"', start=False) as cluster:
        cluster["a"].shift(6 * SECOND)
        cluster.start()
        cluster.await_streaming()
        cluster["a"].client.publish("kept", {"n": 1}, key="ahead")
        cluster.await_out("a", "b", lambda link: link.last_error_reason == "CLOCK_SKEW")
        cluster["a"].server.terminate()
        cluster["a"].shift(0)
        cluster["a"].server.start("--accept-clock")
        cluster.await_equal(topics=BOTH)
        assert cluster["b"].client.get("kept", "ahead") is not None


# --- disks -----------------------------------------------------------------------------------------------------------


def test_when_the_disk_of_the_receiver_is_full_nothing_is_lost(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.client.publish("kept", {"n": 0}, key="0")
    pair.await_streaming()
    largest = max(path.stat().st_size for path in b.server.data.rglob("*") if path.is_file())
    _, hard = resource.prlimit(b.server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(b.server.pid, resource.RLIMIT_FSIZE, (largest + 300_000, hard))
    count = 0
    while not b.server.events("writes_stopped"):
        a.client.publish_many(
            "kept",
            [{"n": n, "pad": "x" * 4000} for n in range(count, count + 50)],
            keys=[str(n) for n in range(count, count + 50)],
        )
        count += 50
        assert count < 20_000
    out = pair.await_out("a", "b", lambda link: link.last_error_reason == "DISK_FULL")
    assert out.lag_sequences > 0
    a.client.publish("kept", {"n": count}, key=str(count))
    assert b.server.terminate() == 0
    b.server.start()  # without the limit
    pair.await_equal(topics=("kept",))
    assert len(b.records("kept")) == count + 1


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_an_instance_that_lost_its_data_is_seeded_anew_under_load(pair: Cluster, seed: int) -> None:
    a, b = pair["a"], pair["b"]
    b.client.publish("kept", {"n": 1}, key="from b")
    pair.await_streaming()
    with loads(pair, seed, "a") as running:
        running[0].await_more(200)
        for _ in range(2):
            b.server.kill9()
            b.wipe()
            running[0].await_more(50)
            b.server.start()
            running[0].await_more(100)
    settled(pair, running)
    assert a.client.get("kept", "from b") is not None, "an empty instance has not deleted anything"
    assert b.client.get("kept", "from b") is not None


def test_an_instance_that_was_away_for_too_long_for_the_journal_is_seeded_under_load(tmp_path: Path, seed: int) -> None:
    """R9: the journal is kept up to `peer_max_lag_bytes`; deletes and renewals of the time away are in the seed."""
    with Cluster(
        tmp_path,
        "a",
        "b",
        topics=TOPICS.replace('"2s"', '"0s"\nretain_bytes = "0B"'),
        more='peer_max_lag_bytes = "1MiB"',
    ) as cluster:
        cluster.await_streaming()
        a, b = cluster["a"], cluster["b"]
        gone = [str(n) for n in range(100)]
        a.client.publish_many("kept", [{"n": n} for n in range(200)], keys=[str(n) for n in range(200)])
        cluster.await_streaming()
        position = cluster.await_in("b", "a", lambda link: link.cursor > 0).cursor
        b.server.kill9()
        a.client.sow_delete("kept", keys=gone)
        with loads(cluster, seed, "a") as running:

            def pruned() -> bool:
                a.client.publish_many("kept", [{"pad": "x" * 5000}] * 40, keys=["pad"] * 40)
                statistics = a.client.describe_topic("kept").statistics
                assert statistics is not None
                return statistics.floor_sequence > position

            until(pruned, WAIT_SECONDS, "the journal to be pruned beyond the cursor")
            b.server.start()
            running[0].await_more(100)
        settled(cluster, running)
        cluster.await_equal(topics=BOTH)
        there = b.records("kept")
        assert not there.keys() & set(gone)
        assert len(there) == 101


# --- bad input -------------------------------------------------------------------------------------------------------


def impostor(cluster: Cluster, name: str, **changed: str) -> Instance:
    """An instance, not yet started, that is called `name` and sends to b of the cluster."""
    other = Instance(f"impostor {name}", cluster.folder / "impostor")
    token = changed.get("token", TOKEN)
    other.server.configure(
        f'[server]\ninstance = "{name}"\n[replication]\ntoken = "{token}"\n'
        f'[[replication.peers]]\nname = "{changed.get("peer", "b")}"\n'
        f'address = "{changed.get("address", cluster["b"].server.address)}"\n' + TOPICS
    )
    return other


def refused(instance: Instance, peer: str) -> tuple[str, str]:
    """Waits until an instance sees that it is refused: the reason, and the state."""
    until(lambda: instance.out(peer).state == "refused", WAIT_SECONDS, f"{instance.name} to be refused by {peer}")
    link = instance.out(peer)
    return link.last_error_reason, link.state


@contextmanager
def run(instance: Instance) -> Iterator[Instance]:
    """Runs an instance that is none of a cluster's."""
    try:
        instance.server.start()
        yield instance
    finally:
        instance.client.close()
        instance.server.kill9()


def assert_goes_on(cluster: Cluster) -> None:
    """The links of a cluster work."""
    for sender, receiver in cluster.links:
        version = cluster[sender].client.publish("kept", {"n": 1}, key=sender).version

        def arrived(receiver: str = receiver, sender: str = sender, version: int = version) -> bool:
            record = cluster[receiver].client.get("kept", sender)
            return record is not None and record.version == version

        until(arrived, WAIT_SECONDS, f"a change of {sender} to be at {receiver}")


def test_a_second_instance_of_a_name_is_refused_while_the_first_one_goes_on(pair: Cluster) -> None:
    with run(impostor(pair, "a")) as other:
        other.client.publish("kept", {"n": 1}, key="impostor's")
        assert refused(other, "b") == ("INSTANCE_NAME_CLASH", "refused")
        seen = pair.await_in("b", "a", lambda link: link.last_error_reason == "INSTANCE_NAME_CLASH")
        assert seen.state == "connected", "the link of the first one stands"
        assert_goes_on(pair)
        assert pair["b"].client.get("kept", "impostor's") is None


def test_a_peer_of_the_same_name_as_the_receiver_is_refused(pair: Cluster) -> None:
    with run(impostor(pair, "b", peer="a")) as other:
        assert refused(other, "a") == ("INSTANCE_NAME_CLASH", "refused")
        assert_goes_on(pair)


def test_an_instance_whose_peer_is_itself_is_refused(pair: Cluster) -> None:
    """Its own address is refused at the start; by way of another one it dials itself."""
    other = impostor(pair, "c", peer="d")
    with Proxy(other.server.address) as proxy:
        other.server.configure(other.server.config.read_text().replace(pair["b"].server.address, proxy.address))
        with run(other):
            assert refused(other, "d") == ("PEER_IS_SELF", "refused")


def test_a_wrong_token_and_a_stranger_are_refused(pair: Cluster) -> None:
    with run(impostor(pair, "a", token="guessed")) as other:
        assert refused(other, "b") == ("PEER_UNAUTHENTICATED", "refused")
    with run(impostor(pair, "stranger")) as other:
        assert refused(other, "b") == ("PEER_NOT_ACCEPTED", "refused")
    assert_goes_on(pair)


def test_topics_that_are_missing_or_differ_leave_the_link_and_come_once_they_are_right(tmp_path: Path) -> None:
    """R12."""
    more = TOPICS + '[topics.only_here]\n[topics.keyed]\nkey = ["/id"]\n'
    with Cluster(tmp_path, "a", "b", topics=TOPICS, start=False) as cluster:
        cluster.configure("a", topics=more)
        cluster.configure("b", topics=TOPICS + '[topics.keyed]\nkey = ["/other"]\n')
        cluster.start()
        a, b = cluster["a"], cluster["b"]
        a.client.publish("only_here", {"n": 1}, key="1")
        a.client.publish("keyed", {"id": 1})
        link = cluster.await_out("a", "b", lambda link: link.state == "streaming" and len(link.topics) == 2)
        assert {(topic.topic, topic.state) for topic in link.topics} == {("only_here", "refused"), ("keyed", "refused")}
        assert "/other" in next(topic.message for topic in link.topics if topic.topic == "keyed")
        seen = cluster.await_in("b", "a", lambda link: link.state == "connected")
        assert {topic.topic for topic in seen.topics} == {"only_here", "keyed"}
        assert_goes_on(cluster)

        b.client.create_topic("only_here")
        cluster.await_out("a", "b", lambda link: [topic.topic for topic in link.topics] == ["keyed"])
        until(lambda: b.client.get("only_here", "1"), WAIT_SECONDS, "the topic to be seeded")
        assert b.server.terminate() == 0
        cluster.configure("b", topics=more)
        b.server.start()
        cluster.await_equal(topics=("only_here", "keyed", "kept"))


class Sender:
    """A sender by hand: messages as they are, and how the link ends."""

    def __init__(self, instance: Instance, *messages: replication_pb2.ReplicateRequest) -> None:
        self.answers: list[replication_pb2.ReplicateResponse] = []
        with grpc.insecure_channel(instance.server.address) as channel:
            call = replication_pb2_grpc.ReplicationServiceStub(channel).Replicate(
                iter([sealed(message, number) for number, message in enumerate(messages, 1)]),
                metadata=(("authorization", f"Bearer {TOKEN}"),),
                timeout=20,
            )
            try:
                for number, response in enumerate(call, 1):
                    self.answers.append(opened(replication_pb2.ReplicateResponse, response, number))
            except grpc.RpcError as error:
                self.reason = reason_name(refused_by(error, instance.server.address).reason)  # type: ignore[arg-type]  # has what it reads of the other kind


def hello(name: str = "a", **changed: int) -> replication_pb2.ReplicateRequest:
    """The first message of an instance that nobody has met."""
    return replication_pb2.ReplicateRequest(
        hello=replication_pb2.Hello(
            protocol=changed.get("protocol", 1),
            instance=replication_pb2.Instance(name=name, id="0123456789abcdef", epoch="e"),
            topics_pattern=".*",
            topics=[replication_pb2.ReplicatedTopic(name="kept", message_type="json", separator=b"\x01")],
            head_sequence=100,
            now_micros=time.time_ns() // 1000,
        )
    )


def changes(
    chunk: bytes, *, crc32: int | None = None, after: int = 100, upto: int = 101
) -> replication_pb2.ReplicateRequest:
    """Changes of the topic `kept`."""
    return replication_pb2.ReplicateRequest(
        changes=replication_pb2.Changes(
            after=after,
            upto=upto,
            chunks=[replication_pb2.Packed(topic="kept", chunk=chunk)],
            origins=["a"],
            crc32=zlib.crc32(chunk) if crc32 is None else crc32,
        )
    )


def seed_part(chunk: bytes) -> replication_pb2.ReplicateRequest:
    """A seed of the topic `kept`."""
    return replication_pb2.ReplicateRequest(
        seed=replication_pb2.Seed(
            topic="kept", first=True, last=True, chunk=chunk, crc32=zlib.crc32(chunk), origins=["a"]
        )
    )


BAD: Final[dict[str, tuple[str, list[replication_pb2.ReplicateRequest]]]] = {
    "protocol": ("PROTOCOL_MISMATCH", [hello(protocol=2)]),
    "no hello": ("PROTOCOL_MISMATCH", [changes(b"")]),
    "two hellos": ("PROTOCOL_MISMATCH", [hello(), hello()]),
    "checksum": ("BATCH_DAMAGED", [hello(), changes(b"x" * 100, crc32=1)]),
    "no chunk": ("BATCH_DAMAGED", [hello(), changes(b"x" * 100)]),
    "empty chunk": ("BATCH_DAMAGED", [hello(), changes(b"")]),
    "zeros": ("BATCH_DAMAGED", [hello(), changes(bytes(100))]),
    "a gap": ("BATCH_DAMAGED", [hello(), changes(b"", after=105, upto=106)]),
    "no seed": ("BATCH_DAMAGED", [hello(), seed_part(b"x" * 100)]),
}


def test_impossible_messages_are_refused_with_a_reason_and_not_applied(tmp_path: Path) -> None:
    """Each in a link of its own, beside a link that goes on."""
    with Cluster(tmp_path, "b", "c", topics=TOPICS, links=[("c", "b")], start=False) as cluster:
        b = cluster["b"]
        cluster.configure("b", accepted=("a",))
        cluster.start()
        cluster.await_streaming()
        b.client.publish("kept", {"n": 1}, key="own")
        before = b.state("kept")
        for name, (reason, messages) in BAD.items():
            sender = Sender(b, *messages)
            assert sender.reason == reason, name
            if sender.answers:
                assert sender.answers[0].WhichOneof("message") == "welcome"
                seen = cluster.await_in("b", "a", lambda link: link.state == "away")
                assert seen.last_error_reason == reason, name
            assert b.state("kept") == before, name
        assert_goes_on(cluster)
        b.server.restart()
        assert_goes_on(cluster)
        assert not cluster.faults()


# --- what is at a replica --------------------------------------------------------------------------------------------

READ: Final = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
dead_letter = "dead"
[topics.dead]
expiration = "enabled"
"""


def key_of(change: Change) -> str:
    """The key of the record that a change is about."""
    record = change.record or change.previous
    assert record is not None
    return record.key


def test_subscribers_durables_and_dead_letters_at_a_replica(tmp_path: Path) -> None:
    """A subscriber at b hears what happens at a, and b's own expiries; its durables and letters are its own."""
    with Cluster(tmp_path, "a", "b", topics=READ, links=[("a", "b")]) as cluster:
        cluster.await_streaming()
        a, b = cluster["a"], cluster["b"]
        durable = b.client.durable("orders", "consumer", changes=True)
        with b.client.subscribe("orders", "/px > 10", oof=True) as following:
            first = a.client.publish("orders", {"id": "1", "px": 20})
            a.client.publish("orders", {"id": "1", "px": 5})
            a.client.publish("orders", {"id": "2", "px": 30})
            a.client.sow_delete("orders", keys=["2"])
            short = a.client.publish("orders", {"id": "3", "px": 40}, ttl="2s")
            heard = [next(following) for _ in range(5)]
            a.server.kill9()  # so that nothing but b itself makes it expire there
            heard.append(next(following))
            assert time.time_ns() // 1000 >= (short.expire_time_micros or 0) - SLACK_MICROS
        assert [(change.op, change.reason, key_of(change)) for change in heard] == [
            ("put", None, "1"),
            ("oof", "match", "1"),
            ("put", None, "2"),
            ("oof", "deleted", "2"),
            ("put", None, "3"),
            ("oof", "expired", "3"),
        ]
        assert heard[0].record is not None
        assert heard[0].record.version == first.version

        with durable:
            delivered = [next(durable) for _ in range(6)]
        assert [(change.op, key_of(change)) for change in delivered] == [
            ("put", "1"),
            ("put", "1"),
            ("put", "2"),
            ("delete", "2"),
            ("put", "3"),
            ("expire", "3"),
        ]

        (letter,) = b.records("dead").values()
        a.server.start()
        until(lambda: a.records("dead"), WAIT_SECONDS, "a letter at a, of its own")
        cluster.await_streaming()
        assert a.records("dead").keys() == b.records("dead").keys() == {letter.key}

        # A condition is judged where the write comes.
        b.client.publish("orders", {"id": "4", "px": 1}, only_if_absent=True)
        a.client.publish("orders", {"id": "4", "px": 2}, only_if_absent=True)
        until(lambda: b.records("orders")["4"].data == {"id": "4", "px": 2}, WAIT_SECONDS, "a's, the later one, to win")
        assert reason_of(lambda: b.client.publish("orders", {"id": "4"}, only_if_absent=True)) == "CONDITION_FAILED"
        assert not cluster.faults()


# --- sync peers ------------------------------------------------------------------------------------------------------


def test_a_sync_peer_that_is_down_is_downgraded_and_counts_again_when_it_has_caught_up(tmp_path: Path) -> None:
    """R8: until the time is out, writes wait; then they are told; the write stands all the same."""
    with Cluster(
        tmp_path, "a", "b", topics=TOPICS, links=[("a", "b")], mode="sync", more='sync_timeout = "1s"'
    ) as cluster:
        cluster.await_streaming()
        a, b = cluster["a"], cluster["b"]
        a.client.publish("kept", {"n": 1}, key="1", durability="replicated")
        assert b.client.get("kept", "1") is not None
        b.server.kill9()
        started = time.monotonic()
        with pytest.raises(ReplicationUnavailable) as told:
            a.client.publish("kept", {"n": 2}, key="2", durability="replicated")
        assert time.monotonic() - started > 0.5, "it waited for the peer"
        assert told.value.reason == "REPLICATION_UNAVAILABLE"
        assert told.value.applied == 1
        assert a.client.get("kept", "2") is not None
        assert a.out("b").mode == "downgraded"
        assert a.server.events("peer_downgraded")
        started = time.monotonic()
        with pytest.raises(ReplicationUnavailable):
            a.client.publish("kept", {"n": 3}, key="3", durability="replicated")
        assert time.monotonic() - started < 0.5, "nobody waits for it any more"
        a.client.publish("kept", {"n": 4}, key="4")
        b.server.start()
        cluster.await_out("a", "b", lambda link: link.mode == "sync")
        assert a.server.events("peer_upgraded")
        assert set(b.records("kept")) == {"1", "2", "3", "4"}
        a.client.publish("kept", {"n": 5}, key="5", durability="replicated")
        assert b.client.get("kept", "5") is not None
        assert not cluster.faults()
