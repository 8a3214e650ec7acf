"""What `sow doctor` makes of what it finds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import grpc
import pytest

from sow.version import __version__
from sow_cli import doctor
from sow_cli.doctor_cells import judged_cells
from sow_cli.findings import Finding
from sow_cli.session import DEFAULT_PORT, Session, connect, host_and_port
from sow_client import (
    CellProblem,
    Client,
    Durable,
    DurableFigures,
    DurableSettings,
    Identity,
    Instance,
    OutgoingLink,
    Placement,
    ReplicationStatus,
    Status,
    Stray,
    Tls,
    Topic,
    TopicSettings,
    TopicStatistics,
    Unavailable,
)
from tests.support.servers.certificates import Authority

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
STATUS = Status(
    instance="nyc-1",
    instance_id="id",
    journal_epoch="epoch",
    server_version="0.1.0",
    state="serving",
    failure="",
    ready_time=NOW,
    clock_time=NOW,
    sweep_paused=False,
    last_sequence=9,
    live_records=100,
    overdue_records=0,
    topics=1,
    disk_bytes=1_000,
    disk_free_bytes=5_000,
)
FIGURES = TopicStatistics(0, 0, 0, 0, 0, 0)
LINK = OutgoingLink(
    peer="ldn-1",
    address="ldn:7450",
    state="streaming",
    mode="async",
    topics_pattern=".*",
    acknowledged_sequence=9,
    lag_sequences=0,
    lag=timedelta(),
    skew=timedelta(),
    since=NOW,
    last_error="",
    last_error_reason="",
    last_error_time=None,
    topics=(),
)


def topic(
    name: str = "orders", *, figures: TopicStatistics = FIGURES, in_config: bool = False, **settings: object
) -> Topic:
    values = TopicSettings(**({"expiration": "enabled"} | settings))  # type: ignore[arg-type]  # names of its fields
    return Topic(name=name, settings=values, set_in_config=in_config, create_time=NOW, statistics=figures)


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


@pytest.mark.parametrize(
    ("skew_micros", "exact_to_micros", "level"),
    [
        (900_000, 0, "ok"),
        (-900_000, 0, "ok"),
        (1_100_000, 0, "warning"),
        (-61_000_000, 0, "fault"),
        (5_000_000, 4_500_000, "ok"),
    ],
)
def test_a_clock_is_judged_by_what_is_certain(skew_micros: int, exact_to_micros: int, level: str) -> None:
    """The server may have read its clock at any moment of the call."""
    assert doctor.clock(skew_micros, exact_to_micros).level == level


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({}, "server", "ok"),
        ({"state": "failed", "failure": "DISK_FULL"}, "server", "fault"),
        ({"sweep_paused": True}, "expiry", "fault"),
        ({"overdue_records": 20_000}, "expiry", "warning"),
        ({"disk_free_bytes": 900}, "disk", "warning"),
        ({"disk_free_bytes": None}, "disk", "skipped"),
    ],
)
def test_the_state_of_the_server(change: dict[str, object], check: str, level: str) -> None:
    found = list(doctor.judged_status(replace(STATUS, **change), 0, 0))  # type: ignore[arg-type]  # names of its fields
    assert levels(found)[check] == level
    assert all(one.advice for one in found if one.level in ("warning", "fault"))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (topic(expiration="disabled"), "sow topic alter orders --expiration enabled"),
        (topic(expiration="disabled", in_config=True), "in [topics.orders] of the configuration"),
        (topic(retain_bytes=-1), "sow retention set orders"),
        (topic(dead_letter="letters", on_missing="drop"), "copies are dropped"),
        (topic("_undelivered", figures=replace(FIGURES, live_records=3)), "dead-letter topic"),
        (
            topic(backlog_quota_bytes=100, figures=replace(FIGURES, backlog_bytes=90, slowest_durable="billing")),
            "sow durable clear-backlog orders billing",
        ),
    ],
)
def test_known_mistakes_of_settings_are_told_with_what_to_do(found: Topic, said: str) -> None:
    (finding,) = doctor.judged_topics([found])
    assert finding.level == "warning"
    assert said in f"{finding.found} {finding.advice}"


def test_one_topic_is_not_called_topics() -> None:
    (finding,) = doctor.judged_topics([topic()])
    assert finding.found.endswith(" of 1 topic")
    assert "serving 100 records in 1 topic" in [one.found for one in doctor.judged_status(STATUS, 0, 0)]


def test_settings_without_a_mistake_are_ok() -> None:
    (finding,) = doctor.judged_topics([topic(dead_letter="letters"), topic("letters", retain_bytes=-1, max_bytes=10)])
    assert finding.level == "ok"


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({}, "ok"),
        ({"state": "paused"}, "warning"),
        ({"state": "refused", "last_error": "no", "last_error_reason": "PEER_DIFFERS"}, "fault"),
        ({"lag": timedelta(minutes=5)}, "warning"),
        ({"mode": "downgraded"}, "warning"),
    ],
)
def test_links_are_judged_by_their_state(change: dict[str, object], level: str) -> None:
    link = replace(LINK, **change)  # type: ignore[arg-type]  # names of its fields
    (finding,) = doctor.judged_links(ReplicationStatus("nyc-1", 9, (link,), ()))
    assert finding.level == level


def test_a_certificate_that_ends_soon_is_told() -> None:
    assert doctor.certificate("a:7450", NOW + timedelta(days=10), NOW).level == "warning"
    assert doctor.certificate("a:7450", NOW + timedelta(days=100), NOW).level == "ok"


def test_versions_that_differ_and_a_slow_connection_are_told() -> None:
    instance = Instance("a:7450", "nyc-1", "id", "epoch", "", True, __version__)
    assert doctor.versions(instance).level == "ok"
    assert doctor.versions(replace(instance, server_version="9.9")).level == "warning"
    assert (doctor.speed(900).level, doctor.speed(300_000).level) == ("ok", "warning")


def test_a_server_without_access_file_is_a_warning_only_where_others_reach_it() -> None:
    nobody = Identity("", "none", "", None, (), {})
    assert doctor.identity(nobody, Session("127.0.0.1:7450", None, connect)).level == "ok"
    assert doctor.identity(nobody, Session("db:7450", None, connect)).level == "warning"
    assert [one.level for one in doctor.tls_of(Session("127.0.0.1:7450,db:7450", None, connect))] == ["ok", "warning"]


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("a:7451", ("a", 7451)),
        ("localhost", ("localhost", DEFAULT_PORT)),
        ("[::1]", ("::1", DEFAULT_PORT)),
        ("[::1]:7451", ("::1", 7451)),
        ("unix:/run/sow.sock", None),
        ("dns:///a:7450", None),
    ],
)
def test_an_address_has_a_host_and_a_port(address: str, found: tuple[str, int] | None) -> None:
    assert host_and_port(address) == found


def test_the_certificate_behind_an_address_without_a_port_is_looked_for_at_the_usual_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Story: `localhost` and `unix:…` were faults: "invalid literal for int()"."""
    asked: list[tuple[str, int]] = []

    def certificate_end(host: str, port: int, _tls: Tls) -> datetime:
        asked.append((host, port))
        return NOW + timedelta(days=10_000)

    monkeypatch.setattr(doctor, "_certificate_end", certificate_end)
    found = list(doctor.tls_of(Session("localhost, unix:/run/sow.sock", Tls(), connect)))
    assert [one.level for one in found] == ["ok", "skipped"]
    assert asked == [("localhost", DEFAULT_PORT)]


def test_the_certificate_of_the_server_is_checked(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    issued = authority.issue("localhost")
    server = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(issued.key.read_bytes(), issued.certificate.read_bytes())])
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    try:

        def found(tls: Tls) -> Finding:
            (finding,) = doctor.tls_of(Session(f"localhost:{port}", tls, connect))
            return finding

        assert "the certificate of localhost" in found(Tls(ca=authority.file)).found
        assert found(Tls(ca=authority.file)).level == "ok"
        assert found(Tls(ca=other.file)).level == "fault"
        assert found(Tls(ca=authority.file, server_name="elsewhere")).level == "fault"
    finally:
        server.stop(None)


def test_a_pin_that_holds_the_journal_names_its_reader() -> None:
    """J18: people have to know which query is dead."""
    figures = DurableFigures(9, 90, 9, 90, timedelta(days=2), exact=False)
    pin = Durable("orders", "spark-1", "", "e.1", "e.1", False, NOW, NOW, DurableSettings(), figures)
    (found,) = doctor.judged_durables([replace(pin, pin=True, reader="Spark 4.3.0, ana on etl-3")], NOW)
    assert found.found == "orders/spark-1 has not acknowledged for 2d0h; it is a pin of Spark 4.3.0, ana on etl-3"
    assert found.advice == "start its reader, or `sow durable delete orders spark-1`: it holds the journal"


def test_a_pin_that_nobody_renews_tells_its_reader_what_it_holds_back_and_when_it_ends() -> None:
    """J18. It is a warning from half of its lease on; before, a reader may just renew it rarely."""
    figures = DurableFigures(9, 90, 9, 4096, timedelta(minutes=10), exact=False)
    settings = DurableSettings(idle_ttl="1h")
    made = Durable("orders", "spark-1", "", "e.1", "e.1", False, NOW, NOW, settings, figures)
    pin = replace(made, pin=True, reader="Spark, ana")

    def found(minutes: int, pin: Durable = pin) -> list[Finding]:
        return list(doctor.judged_durables([pin], NOW + timedelta(minutes=minutes)))

    assert [(one.level, one.found) for one in found(5)] == [("ok", "1 durable subscription, none late")]
    (early,) = found(10)
    assert (early.level, early.found) == (
        "ok",
        (
            "orders/spark-1 was not renewed for 10m00s; it is a pin of Spark, ana; it holds back 9 entries (4.0 KiB); "
            "it ends in 50m00s"
        ),
    )
    assert early.advice == "if its reader is not to go on: `sow durable delete orders spark-1`"
    (late,) = found(40)
    assert (late.level, late.found[-19:]) == ("warning", "; it ends in 20m00s")
    assert late.advice == "its reader has stopped or is dead: start it, or `sow durable delete orders spark-1`"
    assert [(one.level, "it ends" in one.found) for one in found(10, replace(pin, settings=DurableSettings()))] == [
        ("warning", False)
    ]
    (nothing,) = found(10, replace(pin, figures=None, reader="", owner="ana"))
    assert "it is a pin of ana; what it holds back is not told" in nothing.found


def test_the_copy_of_a_topic_is_asked_for_where_the_named_server_says_that_its_cell_is() -> None:
    """C11: the cell b says that c is elsewhere. A credential would go where another cell says."""
    asked: list[str] = []

    def noted(session: Session) -> Client:
        asked.append(session.server)
        raise Unavailable("nobody", reason="UNREACHABLE")

    stray = Stray("orders", "c", 1, NOW)
    told = Placement("b", 1, "d", {"b": ("b:1",), "c": ("evil:1",)}, default="b", strays=(stray,))
    session = Session("b:1", None, noted)
    (finding,) = judged_cells(told, session, {"a": "a:1", "b": "b:1", "c": "c:1"})
    assert asked == ["c:1"]
    assert "UNREACHABLE: nobody" in finding.found
    (finding,) = judged_cells(told, session, {"a": "a:1", "b": "b:1"})
    assert asked == ["c:1"]
    assert "its addresses are not known" in finding.found
    both = [*judged_cells(replace(told, strays=(stray, replace(stray, topic="fills"))), session, {"c": "c:1"})]
    assert len(both) == 2
    assert asked == ["c:1"] * 2, "a cell that is away is waited for once"


class Elsewhere:
    """A client of a cell."""

    def servers_of(self, _topic: str) -> str:
        return "127.0.0.1:1"


def test_cells_that_hang_are_examined_at_the_same_time() -> None:
    begun = threading.Barrier(2)

    def hangs(_session: Session) -> Client:
        begun.wait(30)
        raise Unavailable("nobody", reason="UNREACHABLE")

    client = cast(Client, Elsewhere())
    found = [*doctor._of_others([("b", client), ("c", client)], Session("a:1", None, hangs), {})]
    assert [(one.cell, one.check) for one in found] == [
        ("b", "connection"), ("b", "tls"), ("c", "connection"), ("c", "tls"),
    ]  # fmt: skip


def test_a_person_is_sent_to_a_cell_where_the_named_server_says_that_it_is() -> None:
    """C11. Story: the advice had the addresses of the cell that was asked, and the token file of the caller."""
    has = CellProblem("c", "STRAYS", NOW, "c:1 has 1 topic that lives in b, the cell of this server")
    told = Placement("b", 1, "d", {"b": ("b:1",), "c": ("evil:1",)}, default="b", problems=(has,))
    (finding,) = judged_cells(told, Session("b:1", None, connect), {"b": "b:1", "c": "c:1"})
    assert finding.advice == "its checks say which copy is newer: sow --server c:1 doctor"
    (finding,) = judged_cells(replace(told, cells={}), Session("b:1", None, connect), {"b": "b:1"})
    assert finding.advice == "its checks say which copy is newer"
