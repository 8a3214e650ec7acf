"""Going on at another instance: the table of calls, the addresses, the search and the lines, without I/O (F1 to F3)."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from sow.v1 import access_pb2, admin_pb2, load_pb2, snapshot_pb2, sow_pb2
from sow_client import (
    Cancelled,
    FailedPrecondition,
    Instance,
    InvalidArgument,
    PermissionDenied,
    SowError,
    Tls,
    Unavailable,
)
from sow_client._addresses import Address, expanded, is_name, ordered, parsed
from sow_client._channel import SERVICE_CONFIG_OF_MANY, options
from sow_client._failover import (
    CALLS,
    LOSSES,
    Elsewhere,
    NoAnswer,
    Search,
    Step,
    next_step,
    no_server,
)
from sow_client._lines import KEPT_MAX, Home, Homes, Lines
from sow_client._publish_core import PublishCore, PublisherOptions, StreamDefaults
from sow_client._statuses import REFUSED_SECONDS, Backoff
from tests.support.oracles.failover_table import LOSSES as KINDS
from tests.support.oracles.failover_table import table

PAGE: Final = Path(__file__).parents[3] / "docs" / "failover.md"
FILES: Final = (sow_pb2, admin_pb2, snapshot_pb2, load_pb2, access_pb2)
PATHS: Final = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Every method that clients may call."""


# ---- the table ----


def test_the_table_has_every_rpc_of_the_contract_once() -> None:
    assert set(CALLS) == set(PATHS)


def test_the_page_has_the_same_table() -> None:
    """Every call, and each kind of loss: as `next_step` decides."""
    text = PAGE.read_text()
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in text.splitlines()
        if re.match(r"\| `\w+Service\.", line)
    ]
    assert rows == list(table())
    assert f"| call | {' | '.join(heading for heading, _, _ in KINDS)} |" in text


def test_the_page_has_the_headings_that_other_pages_link_to() -> None:
    found = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert found == [
        "Addresses",
        "What happens to each call",
        "Bookmarks",
        "Live views",
        "Publishers",
        "Durables",
        "How long a move takes",
        "Not promised",
    ]


def test_nothing_that_changes_something_is_made_again_by_itself() -> None:
    """F2. By its name: what only reads, and publishes, which are known elsewhere (F12)."""
    reads = re.compile(r"Get|Query|Subscribe|List|Describe|WhoAmI|CheckAccess")
    again = {path for path, row in CALLS.items() if row.elsewhere is Elsewhere.AGAIN}
    assert {path for path in again if not reads.search(path)} == {PUBLISH, f"{PUBLISH}Stream"}


def test_grpc_repeats_no_publish_on_channels_of_several() -> None:
    """Otherwise the last error of a publish would not tell whether an earlier attempt has left."""
    assert '"Publish"' not in SERVICE_CONFIG_OF_MANY
    assert '"Get"' in SERVICE_CONFIG_OF_MANY


GET, TOUCH, PUBLISH, RENEW = (
    "/sow.v1.SowService/Get",
    "/sow.v1.SowService/Touch",
    "/sow.v1.SowService/Publish",
    "/sow.v1.SnapshotService/RenewExport",
)


@pytest.mark.parametrize("reason", sorted(LOSSES))
def test_a_read_goes_on_elsewhere_after_each_loss(reason: str) -> None:
    assert next_step(GET, reason, again=True, moves=1, kept=False) is Step.ELSEWHERE


@pytest.mark.parametrize("reason", ["OVERLOADED", "WRITE_STALLED", "DEADLINE_EXCEEDED", "LIMIT_EXCEEDED", "INTERNAL"])
@pytest.mark.parametrize("path", [GET, TOUCH, PUBLISH, RENEW])
def test_nothing_moves_for_a_load_or_a_deadline(path: str, reason: str) -> None:
    assert next_step(path, reason, again=True, moves=1, kept=False) is Step.RAISE


def test_a_write_goes_on_elsewhere_only_if_it_was_certainly_not_applied() -> None:
    step = {
        reason: next_step(TOUCH, reason, again=False, moves=1, kept=False)
        for reason in ("STOPPING", "UNREACHABLE", "STORE_FAILED", "DISK_FULL")
    }
    assert step.pop("STOPPING") is Step.ELSEWHERE
    assert set(step.values()) == {Step.RAISE}
    assert next_step(TOUCH, "UNREACHABLE", again=False, moves=1, kept=False, sent=False) is Step.ELSEWHERE


def test_a_get_that_renews_is_a_write_that_grpc_may_have_repeated() -> None:
    """F2: it was made again elsewhere like any read, so its touch was applied there too, over the payload of there."""
    step = {
        reason: next_step(GET, reason, again=True, moves=1, kept=False, sent=False, renews=True)
        for reason in sorted(LOSSES)
    }
    assert step.pop("STOPPING") is Step.ELSEWHERE
    assert set(step.values()) == {Step.RAISE}
    assert next_step(GET, "UNREACHABLE", again=True, moves=0, kept=False, renews=True) is Step.SAME


def test_a_publish_of_unknown_outcome_is_repeated_at_its_own_instance_or_elsewhere_if_that_is_allowed() -> None:
    assert next_step(PUBLISH, "UNREACHABLE", again=True, moves=1, kept=False, goes=False) is Step.SAME
    assert next_step(PUBLISH, "UNREACHABLE", again=False, moves=1, kept=True) is Step.RAISE
    for reason in ("UNREACHABLE", "STORE_FAILED", "DISK_FULL"):
        assert next_step(PUBLISH, reason, again=True, moves=1, kept=False) is Step.ELSEWHERE
        assert next_step(PUBLISH, reason, again=False, moves=1, kept=False, goes=False) is Step.RAISE
    assert next_step(PUBLISH, "STOPPING", again=True, moves=1, kept=False, goes=False) is Step.ELSEWHERE
    assert next_step(PUBLISH, "REPLICATION_UNAVAILABLE", again=True, moves=1, kept=False) is Step.SAME


def test_what_keeps_to_an_instance_goes_nowhere_else() -> None:
    assert next_step(RENEW, "UNREACHABLE", again=True, moves=1, kept=False) is Step.SAME
    assert next_step(RENEW, "STOPPING", again=True, moves=1, kept=True) is Step.RAISE


def test_with_one_address_a_call_is_repeated_as_ever() -> None:
    assert next_step(GET, "UNREACHABLE", again=True, moves=0, kept=False) is Step.SAME
    assert next_step(GET, "UNREACHABLE", again=False, moves=0, kept=False) is Step.RAISE
    assert next_step(GET, "STOPPING", again=True, moves=0, kept=False) is Step.RAISE
    assert next_step(PUBLISH, "REPLICATION_UNAVAILABLE", again=True, moves=0, kept=False) is Step.RAISE


# ---- addresses ----


def test_a_list_has_each_address_once_with_its_port() -> None:
    assert parsed("a") == ("a:7450",)
    assert parsed(" a:7450, b:1 ,[::1],a,unix:/run/sow") == ("a:7450", "b:1", "[::1]:7450", "unix:/run/sow")
    assert parsed(["a:7450", "b:1"]) == parsed(("a", " b:1 ,a")) == ("a:7450", "b:1")


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a,", "a b", "a:0", "a,b:x", ",".join("a" * 101), [], ["a", ""], [7450], [b"a"]]
)
def test_a_list_that_is_none_is_refused(text: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parsed(text)
    assert caught.value.details["field"] == "server"


def test_only_names_that_this_machine_looks_up_may_have_several_addresses() -> None:
    asked = ("sow.example:7450", "10.0.0.1:7450", "[::1]:7450", "localhost:7450", "unix:/x", "dns:///a:1", "a:1")
    assert [server for server in asked if is_name(server, {})] == ["sow.example:7450", "a:1"]
    proxied = {"https_proxy": "http://proxy:3128", "no_proxy": ".internal"}
    assert [server for server in ("a.example:1", "b.internal:1") if is_name(server, proxied)] == ["b.internal:1"]


def test_a_name_with_several_addresses_counts_as_several_in_an_order_that_stays() -> None:
    found = {"many:1": ["10.0.0.2", "10.0.0.1", "fe80::1", "10.0.0.2"], "one:1": ["10.0.0.9"]}
    addresses = expanded(("one:1", "many:1", "none:1"), found)
    assert addresses == (
        Address("one:1"),
        Address("10.0.0.1:1", "many"),
        Address("10.0.0.2:1", "many"),
        Address("[fe80::1]:1", "many"),
        Address("none:1"),
    )
    assert expanded(("many:1",), {"many:1": list(reversed(found["many:1"]))}) == addresses[1:4]


def test_the_certificate_of_one_of_several_addresses_must_have_their_name() -> None:
    chosen = dict(options("10.0.0.1:1", Tls(), host="many", of_many=True))
    assert chosen["grpc.ssl_target_name_override"] == "many"
    assert chosen["grpc.enable_http_proxy"] == 0
    named = dict(options("10.0.0.1:1", Tls(server_name="other"), host="many", of_many=True))
    assert named["grpc.ssl_target_name_override"] == "other"


def test_a_random_order_is_a_clients_own_and_stays() -> None:
    addresses = tuple(Address(f"{name}:1") for name in "abcdef")
    orders = {seed: ordered(addresses, "random", seed) for seed in range(50)}
    assert all(sorted(order, key=lambda address: address.target) == list(addresses) for order in orders.values())
    assert {order[0] for order in orders.values()} == set(addresses), "each is somebody's first"
    for seed, order in orders.items():
        assert ordered(addresses, "random", seed) == order
        fewer = tuple(address for address in addresses if address != order[2])
        assert ordered(fewer, "random", seed) == (*order[:2], *order[3:]), "one that goes does not move the others"
    assert ordered(addresses, "first", 7) == addresses


# ---- the search ----

A, B, C = (Address(f"{name}:1") for name in "abc")


def instance(address: Address, *, cluster: str = "", serving: bool = True, id: str = "") -> Instance:  # noqa: A002 - its field
    return Instance(address.target, address.target[0], id or address.target, "e", cluster, serving, "1")


def gone(address: Address) -> SowError:
    return Unavailable(f"{address.target}: connection refused", reason="UNREACHABLE")


class Asked:
    """A search whose addresses answer as they are told, on a clock of its own."""

    def __init__(self, answers: dict[Address, Instance | SowError], *, cost: float = 0.0) -> None:
        self.now = 0.0
        self.asked: list[Address] = []
        self.answers = answers
        self.cost = cost

    def run(
        self, addresses: Sequence[Address], *, cluster: str = "", serving_only: bool = False, patient: bool = True
    ) -> Search:
        search = Search(addresses, now=0.0, seconds=5.0, cluster=cluster, serving_only=serving_only, patient=patient)
        while (step := search.step(self.now)) is not None:
            if isinstance(step, float):
                assert step > 0
                self.now += step
            else:
                assert search.attempt_seconds(self.now) > 0
                self.asked.append(step)
                self.now += self.cost
                search.heard(self.answers[step])
        return search


def test_the_first_that_serves_is_taken_and_the_others_are_not_asked() -> None:
    asked = Asked({A: gone(A), B: instance(B), C: instance(C)})
    found = asked.run((A, B, C)).found
    assert found == (B, instance(B))
    assert asked.asked == [A, B]
    assert asked.now == 0.0, "no pause before every address was asked"


def test_an_instance_that_does_not_serve_is_passed_over() -> None:
    asked = Asked({A: instance(A, serving=False), B: instance(B)})
    assert asked.run((A, B)).found == (B, instance(B))


def test_if_none_serves_the_first_that_answers_is_taken_after_one_round() -> None:
    idle = instance(B, serving=False)
    asked = Asked({A: gone(A), B: idle, C: instance(C, serving=False)})
    assert asked.run((A, B, C)).found == (B, idle)
    assert asked.asked == [A, B, C]
    assert Asked({A: idle}).run((A,), serving_only=True).found is None, "nobody goes back to one"


def test_a_search_asks_again_until_its_time_is_over_and_tells_each_answer() -> None:
    asked = Asked({A: gone(A), B: gone(B)})
    search = asked.run((A, B))
    assert search.found is None
    assert 4.0 < asked.now <= 5.0
    assert asked.asked[:4] == [A, B, A, B]
    assert len(asked.asked) < 60, "with growing pauses"
    error = search.failure()
    assert (type(error), error.reason) == (Unavailable, "UNREACHABLE")
    assert "a:1: connection refused" in error.message
    assert "b:1: connection refused" in error.message


def test_where_all_refuse_a_client_that_has_used_none_does_not_wait() -> None:
    """F1: it took the whole `connect_timeout` to say that nobody is there. Each has been tried twice by then."""
    asked = Asked({A: gone(A), B: no_server(B.target)})
    search = asked.run((A, B), patient=False)
    assert search.found is None
    assert REFUSED_SECONDS <= asked.now < 0.5
    assert asked.asked.count(A) == asked.asked.count(B) > 2
    error = search.failure()
    assert error.reason == "UNREACHABLE"
    assert "a:1: connection refused" in error.message
    assert "within" not in error.message
    assert Backoff().delay(error, now=0.0, jitter=0.0, limit=5.0) is None, "nobody tries again by itself"


def test_an_address_that_says_nothing_is_waited_for_also_at_first() -> None:
    silent = NoAnswer("a:1: no answer", reason="UNREACHABLE")
    asked = Asked({A: silent, B: gone(B)}, cost=0.1)
    search = asked.run((A, B), patient=False)
    assert asked.now > 4.0
    assert "within 5 s" in search.failure().message


def test_addresses_that_say_nothing_cost_a_quarter_of_a_second_each() -> None:
    search = Search((A, B, C), now=0.0, seconds=5.0)
    assert search.step(0.0) == A
    assert search.attempt_seconds(0.0) == 0.25
    search.heard(gone(A))
    assert search.step(0.25) == B


def test_every_address_is_asked_once_however_short_the_time_is() -> None:
    asked = Asked({A: gone(A), B: instance(B)}, cost=6.0)
    assert asked.run((A, B)).found == (B, instance(B))


def test_an_instance_of_another_cluster_is_refused_with_both_names() -> None:
    asked = Asked({A: instance(A, cluster="green"), B: instance(B, cluster="blue"), C: instance(C)})
    assert asked.run((A, B), cluster="blue").found == (B, instance(B, cluster="blue"))
    assert asked.run((A, C), cluster="blue").found == (C, instance(C)), "one without a cluster is accepted"
    assert asked.run((A,), cluster="").found is not None

    error = asked.run((A,), cluster="blue").failure()
    assert (type(error), error.reason) == (FailedPrecondition, "OTHER_CLUSTER")
    assert "blue" in error.message
    assert "green" in error.message
    asked.answers[B] = gone(B)
    assert asked.run((A, B), cluster="blue").failure().reason == "UNREACHABLE", "that may pass"


def test_an_instance_that_refuses_the_caller_ends_the_search() -> None:
    """The call would be refused as with one address."""
    refusal = PermissionDenied("who are you", reason="UNAUTHENTICATED")
    with pytest.raises(PermissionDenied):
        Asked({A: refusal, B: instance(B)}).run((A, B))


def test_searches_end_and_take_what_serves_whatever_the_addresses_answer() -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for _ in range(500):
        addresses = [Address(f"{number}:1") for number in range(draw.randint(1, 5))]
        answers: dict[Address, Instance | SowError] = {}
        for address in addresses:
            answers[address] = gone(address)
            if draw.random() < 0.5:
                answers[address] = instance(address, serving=draw.random() < 0.4)
        serving = [address for address in addresses if getattr(answers[address], "serving", False)]
        answering = [address for address in addresses if isinstance(answers[address], Instance)]
        found = Asked(answers, cost=draw.choice([0.0, 0.3])).run(addresses).found
        expected = next(iter(serving or answering), None)
        assert (None if found is None else found[0]) == expected, f"seed {seed}"


# ---- lines ----


class Channel:
    """As much of a channel as a line needs."""

    def unary_unary(self, path: str) -> None: ...


def lines(server: str, **named: str) -> Lines[Channel]:
    return Lines(server, None, None, None, lambda target, credentials, options: Channel(), prefer="first", **named)


class Call:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_a_client_with_one_address_has_one_line_and_never_moves() -> None:
    one = lines("10.0.0.1:1")
    assert one.single is not None
    assert one.current is one.single
    one.doubt("UNREACHABLE")
    assert one.leave(one.single, "UNREACHABLE") == []
    assert one.current is one.single


def test_a_move_ends_the_subscriptions_on_the_line_that_is_left_and_no_others() -> None:
    three = lines("10.0.0.1:1,10.0.0.2:1")
    a, b = (three.line(address) for address in three.order({}))
    assert three.use(a, instance(A)) == ([], None), "the first line is no move"
    here, there = Call(), Call()
    assert three.follows(a, here)
    ended, move = three.use(b, instance(B))
    assert (ended, move) == ([here], (instance(A), instance(B)))
    assert three.follows(b, there)
    assert not three.follows(a, Call()), "one that began there meanwhile is ended, too"
    assert three.leave(a, "UNREACHABLE") == [], "it is not in use any more"
    assert three.leave(b, "NOT_SERVING") == [there]
    assert (three.current, three.lost) == (None, "NOT_SERVING")


def test_a_line_that_was_doubted_is_left_with_its_subscriptions_and_its_watch() -> None:
    """A call failed before the watch told why. The watch, which had ended, stayed in its place, so nothing watched the
    instance when it was used again; and the subscriptions went on at an instance that had stopped writing."""
    two = lines("10.0.0.1:1,10.0.0.2:1")
    a, b = (two.line(address) for address in two.order({}))
    two.use(a, instance(A))
    here, watch = Call(), Call()
    a.watch = watch
    assert two.follows(a, here)
    two.doubt("STORE_FAILED")
    assert two.leave(b, "UNREACHABLE") == [], "it was not in use"
    assert two.leave(a, "NOT_SERVING") == [here, watch]
    assert [line.watch for line in (a, b)] == [None, None]
    assert (two.current, two.lost) == (None, "STORE_FAILED")


def test_the_same_instance_again_is_no_move_and_another_one_at_its_address_is() -> None:
    one = lines("10.0.0.1:1,10.0.0.2:1")
    line = one.line(one.order({})[0])
    one.use(line, instance(A))
    one.doubt("UNREACHABLE")
    assert one.current is None
    assert one.use(line, instance(A)) == ([], None)
    assert one.use(line, instance(A, id="wiped")) == ([], (instance(A), instance(A, id="wiped")))


def test_a_clients_cluster_is_that_of_the_first_instance_that_has_one() -> None:
    some = lines("10.0.0.1:1,10.0.0.2:1")
    a, b = (some.line(address) for address in some.order({}))
    for line, cluster in ((a, ""), (b, "blue"), (a, "")):
        some.use(line, instance(line.address, cluster=cluster))
    assert some.cluster == "blue"


def test_a_client_that_is_closed_opens_no_channel() -> None:
    """A search went on beside `close`: it opened the channel of the next address, which nobody closed any more."""
    some = lines("10.0.0.1:1,10.0.0.2:1")
    first, second = some.order({})
    line = some.line(first)
    assert some.close() == [line.channel]
    with pytest.raises(Cancelled) as caught:
        some.line(second)
    assert caught.value.reason == "CLOSED"
    assert some.opened == [line]


def test_the_homes_of_exports_are_remembered_up_to_a_bound() -> None:
    homes = Homes()
    kept = Home("the export")
    homes.keep("first", kept)
    assert homes.of("first") is kept
    for number in range(KEPT_MAX):
        homes.keep(str(number), Home("the export"))
    assert homes.of("first") is None
    assert homes.of(str(KEPT_MAX - 1)) is not None


def test_a_line_knows_the_contract_of_its_instance_until_that_is_doubted() -> None:
    """The next server at the address of a client's only one may be an older one."""
    some = lines("10.0.0.1:1,10.0.0.2:1")
    line = some.line(some.order({})[0])
    some.use(line, replace(instance(A), contract=7))
    assert line.contract == 7
    one = lines("10.0.0.1:1")
    assert one.single is not None
    one.single.contract = 7
    one.doubt("UNREACHABLE")
    assert one.single.contract == 0


def test_an_unknown_preference_or_mode_is_refused() -> None:
    from sow_client import Client

    for named in ({"prefer": "nearest"}, {"failover_publish": "maybe"}):
        with pytest.raises(InvalidArgument) as caught:
            Client("10.0.0.1:1,10.0.0.2:1", **named)  # type: ignore[arg-type]  # that is the point
        assert caught.value.details["field"] == next(iter(named))


def test_a_token_for_another_machine_needs_tls_for_each_address_of_a_list() -> None:
    from sow_client import Client

    with pytest.raises(InvalidArgument) as caught:
        Client("127.0.0.1:1,10.0.0.2:1", token="s3cret")
    assert "10.0.0.2" in caught.value.message


# ---- publishers ----


def publisher(**named: object) -> PublishCore:
    unit, token = int(str(named.pop("unit", 0))), int(str(named.pop("token", 0)))
    options = PublisherOptions(**named)  # type: ignore[arg-type]  # its fields
    defaults = StreamDefaults("orders", unit=unit)
    core = PublishCore(defaults, options, publisher_id="p", publisher_epoch=1, publisher_token=token)
    for number in range(2):
        core.pending.append(b"%d" % number)
        core.seal()
    return core


def test_a_publisher_is_bound_to_an_instance_while_records_that_it_may_have_are_unsettled() -> None:
    core = publisher()
    bound = [core.is_bound]
    core.next_request()
    core.next_request()
    bound.append(core.is_bound)
    core.acknowledge(sow_pb2.PublishStreamResponse(applied=1))
    core.rewind()
    bound.append(core.is_bound)
    core.next_request()
    core.acknowledge(sow_pb2.PublishStreamResponse(applied=1))
    bound.append(core.is_bound)
    assert bound == [False, True, True, False], "nothing sent, both, the second one cut off, all settled"


def test_records_that_an_instance_refused_because_it_stops_may_go_anywhere() -> None:
    """P6: nothing from the refused record on was applied, also in later requests of the stream."""
    core = publisher()
    core.next_request()
    core.next_request()
    refusal = sow_pb2.PublishStreamResponse()
    refusal.refusals.add(index=0, reason=34)  # STOPPING
    _, error = core.acknowledge(refusal)
    assert error is not None
    assert error.reason == "STOPPING"
    core.rewind()
    assert not core.is_bound


@pytest.mark.parametrize(
    ("named", "bound"),
    [
        ({"failover": "again"}, False),
        ({"failover": "again", "unit": 1}, True),
        ({"failover": "again", "keeps": True}, True),
        ({"failover": "again", "keeps": True, "token": 5}, False),
        ({"failover": "again", "keeps": True, "token": 5, "unit": 1}, True),
        ({"failover": "unsent", "keeps": True, "token": 5}, True),
        ({"unit": 1}, True),
    ],
)
def test_a_unit_and_an_epoch_bind_a_publisher_to_its_instance(named: dict[str, object], bound: bool) -> None:
    core = publisher(**named)
    core.next_request()
    assert core.is_bound is bound


def test_a_publisher_keeps_to_an_older_instance_that_may_have_its_records() -> None:
    """F12: such an instance tells no other what has arrived, so a retry elsewhere would be applied again."""
    core = publisher(failover="again")
    core.is_told = False
    bound = [core.is_bound]
    core.next_request()
    core.next_request()
    bound.append(core.is_bound)
    for _ in range(2):
        core.acknowledge(sow_pb2.PublishStreamResponse(applied=1))
    bound.append(core.is_bound)
    assert bound == [False, True, False]


def test_a_full_disk_ends_a_publisher_unless_its_records_may_go_elsewhere() -> None:
    error = Unavailable("full", reason="DISK_FULL")
    with pytest.raises(Unavailable):
        publisher().retry_delay(error, now=0.0, jitter=0.0)
    assert publisher(failover="again").retry_delay(error, now=0.0, jitter=0.0) > 0
    with pytest.raises(Unavailable):
        publisher(failover="again", unit=1).retry_delay(error, now=0.0, jitter=0.0)


def test_what_grpc_says_of_a_call_that_never_left() -> None:
    from sow_client._statuses import never_sent

    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/sow.v1.SowService/Touch")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=10)
    assert never_sent(caught.value)
