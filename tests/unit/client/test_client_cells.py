"""The way of a call to the cell of its topic, and all cells (rules C10, C11, C13, C19), without a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from sow.v1 import access_pb2, admin_pb2, snapshot_pb2, sow_pb2, types_pb2
from sow_client import Client, FailedPrecondition, InvalidArgument, SowError, Unavailable
from sow_client._cells import Cells, Way, topic_of
from sow_client._lines import KEPT_MAX, Home, Line
from sow_client._publish_core import OpenedPublisher, PublishCore, PublisherOptions, StreamDefaults
from sow_client.errors import error_of_reason
from tests.support.fakes.fake_channels import Ended


def elsewhere(cell: str, by: str = "home", topic: str = "orders") -> SowError:
    details = {"topic": topic, "cell": cell, "servers": f"{cell}:1", "from_cell": by}
    return error_of_reason("TOPIC_ELSEWHERE", f"{topic} lives in the cell {cell}", details=details)


NOT_FOUND = error_of_reason("TOPIC_NOT_FOUND", "there is no topic orders")
LOST = error_of_reason("UNREACHABLE", "nobody answers", code="UNAVAILABLE")


def new(opened: Callable[[str], str] = str) -> Cells[str]:
    return Cells("home", opened)


def walk(way: Way[str], *errors: SowError) -> list[str]:
    """Where the calls of a way are made, as each of these errors comes; "" at the end of the way."""
    return [way.place.transport, *(way.place.transport if way.leads(error) else "" for error in errors)]


def test_a_call_goes_where_home_says_and_the_next_one_at_once() -> None:
    cells = new()
    assert walk(cells.way("orders"), elsewhere("b")) == ["home", "b:1"]
    assert walk(cells.way("orders")) == ["b:1"]
    assert walk(cells.way("others")) == ["home"]
    assert walk(cells.way(""), elsewhere("b")) == ["home", ""], "a call without a topic, or with a pattern"


def test_a_cell_that_denies_a_topic_is_asked_for_no_address() -> None:
    """C11: whatever b says, home is asked. It names b again, so the call ends with the words of both."""
    opened: list[str] = []

    def noted(servers: str) -> str:
        opened.append(servers)
        return servers

    cells = new(noted)
    way = cells.way("orders")
    assert walk(way, elsewhere("b"), elsewhere("c", by="b"), elsewhere("b")) == ["home", "b:1", "home", ""]
    assert opened == ["b:1"]
    assert way.told(elsewhere("b")).message == (
        "orders: the cell home says that it lives in the cell b, and the cell b says that it lives in the cell "
        "c: their placements differ"
    )
    assert walk(cells.way("orders")) == ["home"], "it is forgotten"


def test_a_topic_that_has_moved_on_is_followed() -> None:
    cells = new()
    walk(cells.way("orders"), elsewhere("b"))
    assert walk(cells.way("orders"), elsewhere("c", by="b"), elsewhere("c")) == ["b:1", "home", "c:1"]
    assert walk(cells.way("orders"), elsewhere("home", by="c")) == ["c:1", "home"]
    assert walk(cells.way("orders")) == ["home"]


def test_a_call_does_not_go_where_another_of_its_topics_lives() -> None:
    """An export of several topics: its first topic decides, and an error about another one says nothing of that."""
    cells = new()
    way = cells.way("orders")
    assert walk(way, elsewhere("b", topic="trades")) == ["home", ""]
    message = "trades lives in the cell b; the topics of one call must live in one cell"
    assert way.told(elsewhere("b", topic="trades")).message == message

    walk(way, elsewhere("b"))
    missing = error_of_reason("TOPIC_NOT_FOUND", "there is no topic trades", details={"topic": "trades"})
    for error in (missing, elsewhere("home", by="b", topic="trades")):
        assert walk(cells.way("orders"), error) == ["b:1", ""]
    assert walk(cells.way("orders")) == ["b:1"], "it is remembered"


def test_a_call_does_not_wander_for_ever() -> None:
    way = new().way("orders")
    found = walk(way, *(elsewhere(cell) for cell in ("b", "x", "c", "x", "d", "x")))
    assert found[:5] == ["home", "b:1", "home", "c:1", ""]


def test_a_cell_without_the_topic_makes_a_call_ask_home_once() -> None:
    cells = new()
    assert walk(cells.way("orders"), elsewhere("b"), NOT_FOUND) == ["home", "b:1", ""], "home has just said so"
    assert walk(cells.way("orders")) == ["home"]
    walk(cells.way("orders"), elsewhere("b"))
    way = cells.way("orders")
    assert walk(way, NOT_FOUND, elsewhere("b")) == ["b:1", "home", ""]
    told = way.told(elsewhere("b"))
    assert (told.reason, told.details["cell"]) == ("TOPIC_NOT_FOUND", "b")
    assert told.message == "the cell b, where orders lives: there is no topic orders"
    assert walk(cells.way("orders")) == ["b:1"]


def test_a_cell_that_was_not_reached_may_have_other_addresses_by_the_next_call() -> None:
    cells = new()
    way = cells.way("orders")
    assert walk(way, elsewhere("b"), LOST) == ["home", "b:1", ""]
    told = way.told(LOST)
    assert (told.message, told.details["cell"]) == ("the cell b, where orders lives: nobody answers", "b")
    assert cells.way("orders").told(LOST) is LOST, "home is shown as ever"
    assert walk(cells.way("orders")) == ["home"]


@pytest.mark.parametrize(
    "servers",
    [
        "unix:/run/x",
        "unix:7450",
        "UNIX:7450",
        "unix-abstract:1",
        "dns:53",
        "dns:///b",
        "",
        "b:1,",
        "b:99999",
        "b:1 c:2",
    ],
)
def test_an_address_that_is_not_host_and_port_is_not_used(servers: str) -> None:
    error = elsewhere("b")
    error.details["servers"] = servers
    assert walk(new().way("orders"), error) == ["home", ""]


def test_a_call_that_two_cells_deny_begins_again_for_a_while() -> None:
    """So it is while a topic moves (rule C17)."""
    way = new().way("orders")
    pauses: list[float] = []
    while sum(pauses) < 10:
        assert way.leads(elsewhere("b"))
        assert way.leads(elsewhere("home"))
        assert not way.leads(elsewhere("b"))
        pause = way.pause(elsewhere("b"))
        if pause is None:
            break
        pauses.append(pause)
    assert 1.9 < sum(pauses) < 2.5
    assert way.pause(elsewhere("b")) is None
    assert new().way("orders").pause(elsewhere("b")) is None, "nobody has contradicted"


def test_where_a_credential_may_not_go_the_error_says_why() -> None:
    def refused(_servers: str) -> str:
        raise InvalidArgument("token: over TLS only", reason="INVALID_ARGUMENT")

    way = Cells("home", refused).way("orders")
    assert walk(way, elsewhere("b")) == ["home", ""]
    assert way.told(elsewhere("b")).message.endswith("this client does not go there: token: over TLS only")


def test_the_topics_that_are_remembered_are_bounded() -> None:
    cells = new()
    for number in range(KEPT_MAX + 1):
        walk(cells.way(f"topic-{number}"), elsewhere("b", topic=f"topic-{number}"))
    assert walk(cells.way("topic-0")) == ["home"]
    assert walk(cells.way(f"topic-{KEPT_MAX}")) == ["b:1"]
    assert len(cells.others) == 1


def test_what_has_begun_in_a_cell_stays_there() -> None:
    cells = new()
    way, export = cells.way("orders"), Home("the export")
    walk(way, elsewhere("b"))
    assert cells.way("", export).place is cells.home
    way.place.begins(export)
    assert cells.way("", export).place.transport == "b:1"
    cells.home.begins(export)
    assert export.cell == ""
    line: object = export.line
    assert line is None


# -- all cells ---------------------------------------------------------------------------------------------------------


def told(cell: str = "home", **cells: str) -> admin_pb2.GetPlacementResponse:
    """What home says of its placement. `cells`: the addresses of the others."""
    known = [admin_pb2.Cell(name=name, servers=[servers]) for name, servers in ({"home": "h:1"} | cells).items()]
    return admin_pb2.GetPlacementResponse(cell=cell, version=1, cells=known)


def test_all_cells_are_those_that_home_names_and_home_is_one_of_them() -> None:
    cells = new()
    assert cells.all == {"": cells.home}
    cells.placed(told(b="b:1", c="c:1"), "connection 1")
    assert {cell: place.transport for cell, place in cells.all.items()} == {"home": "home", "b": "b:1", "c": "c:1"}
    walk(way := cells.way("orders"), elsewhere("b"))
    assert way.place is cells.all["b"], "one connection to a cell"
    cells.placed(told(c="c:2"), "connection 1")
    assert {cell: place.transport for cell, place in cells.all.items()} == {"home": "home", "c": "c:2"}


def test_that_there_are_no_cells_is_asked_once_a_connection_and_a_placement_each_time() -> None:
    cells = new()
    for answer in (None, admin_pb2.GetPlacementResponse()):  # None: a server of an earlier version
        assert cells.is_to_ask("connection 1")
        cells.placed(answer, "connection 1")
        assert cells.all == {"": cells.home}
        assert not cells.is_to_ask("connection 1")
        assert cells.is_to_ask("connection 2"), "its server may be another one"
        cells.placed(told(b="b:1"), "connection 2")
    assert cells.is_to_ask("connection 2")
    cells.placed(admin_pb2.GetPlacementResponse(cell="home"), "connection 2")
    assert cells.all == {"home": cells.home}, "the caller may not know the others"
    assert cells.is_to_ask("connection 2")


def test_a_client_on_a_channel_of_the_program_has_one_cell() -> None:
    assert not Cells("home", None).is_to_ask("connection 1")


@pytest.mark.parametrize("servers", ["unix:/run/b", "dns:///b"])
def test_a_cell_to_which_the_client_does_not_go_is_told(servers: str) -> None:
    """C19: a list without it would not be whole."""
    cells = new()
    cells.placed(told(b=servers, c="c:1"), "connection 1")
    assert [*cells.all] == ["home", "c"]
    (refused,) = cells.refused.values()
    assert refused.details == {"cell": "b"}
    assert refused.message == f"the cell b: this client does not go there: {servers!r} is no list of HOST:PORT"
    cells.placed(told(b="b:1", c="c:1"), "connection 1")
    assert not cells.refused


def test_where_a_credential_may_not_go_the_other_cells_are_there() -> None:
    def opened(servers: str) -> str:
        if servers == "b:1":
            raise InvalidArgument("token: over TLS only", reason="INVALID_ARGUMENT")
        return servers

    cells = new(opened)
    cells.placed(told(b="b:1", c="c:1"), "connection 1")
    assert ([*cells.all], [*cells.refused]) == (["home", "c"], ["b"])
    assert cells.refused["b"].message == "the cell b: this client does not go there: token: over TLS only"


def test_the_error_of_a_cell_names_it() -> None:
    cells = new()
    cells.placed(told(b="b:1"), "connection 1")
    places = cells.all
    for error in (LOST, error_of_reason("PERMISSION_DENIED", "nobody answers")):
        named = cells.at(places["b"]).told(error)
        assert (named.message, named.details["cell"]) == ("the cell b: nobody answers", "b")
        assert cells.at(places["home"]).told(error) is error, "home is shown as ever"
    assert walk(cells.at(places["b"]), elsewhere("c", by="b")) == ["b:1", ""], "it goes nowhere else"


def test_the_topic_of_a_request() -> None:
    assert topic_of(sow_pb2.GetRequest(topic="orders")) == "orders"
    assert topic_of(snapshot_pb2.OpenExportRequest(topic="orders")) == "orders"
    assert topic_of(admin_pb2.CreateTopicRequest(name="orders")) == "orders"
    assert topic_of(admin_pb2.GetPolicyRequest(name="policy")) == ""
    assert topic_of(sow_pb2.SubscribeRequest(topic_pattern="or.*")) == ""
    assert topic_of(admin_pb2.GetPlacementRequest(topic="orders")) == "", "each cell answers for itself"
    assert topic_of(access_pb2.CheckAccessRequest(topic="orders")) == "orders", "a record is judged in its cell"
    assert topic_of(admin_pb2.GetStatusRequest()) == ""


def test_a_change_that_may_have_been_applied_is_not_made_in_another_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """C10: the connection broke, and the server that is back has a new placement. A read is made again."""
    details = elsewhere("b").details
    answers: list[Ended] = []

    def method(_line: Line[Any], _kind: str, _path: str, *_: Any) -> Callable[..., Any]:
        def call(_request: object, timeout: float | None = None) -> Any:
            raise answers.pop(0)

        return call

    def script() -> None:
        answers[:] = [
            Ended(grpc.StatusCode.UNAVAILABLE, text="Socket closed"),
            Ended(grpc.StatusCode.FAILED_PRECONDITION, "TOPIC_ELSEWHERE", "moved", details),
            Ended(grpc.StatusCode.FAILED_PRECONDITION, "NO_JOURNAL", "in the cell b"),
        ]

    with Client("127.0.0.1:1", environment={}) as client:
        line = client._transport.lines.single
        monkeypatch.setattr("sow_client.blocking._moving.Transport.await_ready", lambda *_: line)
        monkeypatch.setattr(Line, "method", method)
        script()
        with pytest.raises(Unavailable):
            client.publish("orders", b"{}", key="1")
        assert len(answers) == 1
        script()
        with pytest.raises(FailedPrecondition, match="in the cell b"):
            client.get("orders", "1")


# -- publishers --------------------------------------------------------------------------------------------------------


def publisher(way: Way[str] | None, *, opens: bool = False, keeps: bool = False, unit: int = 0) -> PublishCore:
    options = PublisherOptions(2, 4, keeps=keeps)
    defaults = StreamDefaults("orders", unit=unit)
    core = PublishCore(defaults, options, publisher_id="p", publisher_epoch=1, way=way, opens=opens)
    core.pending.extend([b"1", b"2", b"3", b"4"])
    while core.pending:
        core.seal()
    core.release()
    return core


def refused(records: int) -> sow_pb2.PublishStreamResponse:
    """The answer to a request whose topic lives elsewhere."""
    refusals = [
        types_pb2.Refusal(index=index, reason=types_pb2.ERROR_REASON_TOPIC_ELSEWHERE, details=elsewhere("b").details)
        for index in range(records)
    ]
    return sow_pb2.PublishStreamResponse(refusals=refusals)


def positions(core: PublishCore) -> list[tuple[int, int]]:
    found = []
    while (request := core.next_request()) is not None:
        found.append((request.publisher.publisher_epoch, request.publisher.first_sequence))
    return found


def moved(core: PublishCore, applied: int = 0) -> float:
    """The topic lives elsewhere, once so many records are applied."""
    if applied:
        core.acknowledge(sow_pb2.PublishStreamResponse(applied=applied))
    ack, error = core.acknowledge(refused(2))
    assert (ack.records, core.refused) == (0, 0)
    assert error is not None
    core.rewind()
    return core.retry_delay(error, now=0.0, jitter=0.0)


def test_the_unsettled_records_of_a_publisher_begin_an_epoch_in_the_other_cell() -> None:
    """C13: the cell that has refused them holds their positions for decided, and it may get the topic back."""
    cells = new()
    way = cells.way("orders")
    core = publisher(way)
    assert positions(core) == [(1, 1), (1, 3)]
    token = core.publisher_token
    assert moved(core, applied=2) == 0.0
    assert way.place.transport == "b:1"
    assert positions(core) == [(2, 1)]
    assert core.publisher_token != token
    core.pending.append(b"5")
    core.seal()
    assert positions(core) == [(2, 3)], "the sequences have no gap"
    assert core.unacknowledged == 3


def test_a_publisher_with_an_id_of_the_program_wants_another_epoch_there() -> None:
    core = publisher(new().way("orders"), opens=True, keeps=True, unit=7)
    positions(core)
    assert moved(core) == 0.0
    assert core.wants_epoch
    core.opened(OpenedPublisher(9, unit_done=False, unit_records=0, token=1))
    assert positions(core) == [(9, 1), (9, 3)]


@pytest.mark.parametrize(("opens", "unit", "applied"), [(False, 0, 0), (True, 7, 2)])
def test_a_publisher_stays_with_an_epoch_of_the_program_and_with_a_unit_that_has_begun(
    opens: bool, unit: int, applied: int
) -> None:
    core = publisher(new().way("orders"), opens=opens, keeps=True, unit=unit)
    positions(core)
    with pytest.raises(FailedPrecondition, match="open_publisher takes the topic"):
        moved(core, applied)
