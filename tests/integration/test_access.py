"""Identities and permissions against a real server (rules A1 to A8). `test_access_matrix.py` has the rights of each
method."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_client import Client, InvalidArgument, NotFound, PermissionDenied, ResourceExhausted, SowError
from sow_server.access.audit import Part
from tests.support.oracles.access import GUARDED, audit_file, audited, client_of, grant, identity, peer, write_access
from tests.support.servers.server import ServerProcess, health, reason_of, until

ROWS = 'rows = "/region = \'eu\'"\nhide = ["/client/iban"]'
ACCESS = (
    identity("desk", "desk")
    + grant("desk", "orders", "read publish delete consume", ROWS)
    + identity("other", "other")
    + grant("other", "orders", "read consume publish")
    + identity("nobody")
    + identity("late", "other", more="expires = 2020-01-01")
    + identity("few", "few")
    + grant("few", "orders", "read publish create consume")
    + "[roles.few.limits]\nsubscriptions = 1\ndurables = 1\nexports = 1\npublishers = 2\n"
    + peer("ldn")
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    write_access(folder, ACCESS)
    with ServerProcess(folder, GUARDED + '[replication]\naccept = ["ldn"]\n') as made:
        with client_of(made, "root") as root:
            root.create_topic("orders", key=["/id"])
            root.create_topic("secret", key=["/id"])
        yield made


@pytest.fixture
def root(server: ServerProcess) -> Iterator[Client]:
    with client_of(server, "root") as client:
        client.sow_delete("orders", all=True)
        client.publish("orders", {"id": "eu", "region": "eu", "price": 1, "client": {"iban": "X-EU", "name": "a"}})
        client.publish("orders", {"id": "us", "region": "us", "price": 2, "client": {"iban": "X-US", "name": "b"}})
        yield client


@pytest.fixture
def desk(server: ServerProcess, root: Client) -> Iterator[Client]:
    with client_of(server, "desk") as client:
        yield client


# --- who calls -------------------------------------------------------------------------------------------------------


def refused(server: ServerProcess, token: str | None) -> SowError:
    with Client(server.address, token=token) as client, pytest.raises(PermissionDenied) as caught:
        client.whoami()
    return caught.value


def test_a_call_without_a_known_credential_is_unauthenticated(server: ServerProcess) -> None:
    assert refused(server, None).reason == "UNAUTHENTICATED"
    assert refused(server, "guessed").reason == "UNAUTHENTICATED"
    assert "has expired" in refused(server, "late").message


def test_health_needs_no_credential(server: ServerProcess) -> None:
    assert health(server.address) == "SERVING"


def test_whoami_tells_roles_and_limits(server: ServerProcess) -> None:
    with client_of(server, "few") as client:
        found = client.whoami()
    assert (found.name, found.credential, found.roles) == ("few", "token", ("few",))
    assert found.limits["subscriptions"] == 1


# --- what may be seen ------------------------------------------------------------------------------------------------


def test_what_is_not_granted_does_not_exist(desk: Client) -> None:
    assert [record.key for record in desk.query("orders")] == ["eu"]
    assert desk.get("orders", "us") is None
    assert desk.count("orders") == 1
    found = desk.get("orders", "eu")
    assert found is not None
    assert json.loads(found.payload)["client"] == {"name": "a"}
    assert [topic.name for topic in desk.topics(with_statistics=True)] == ["orders"]
    errors = []
    for name in ("secret", "absent"):
        with pytest.raises(NotFound) as caught:
            desk.count(name)
        errors.append(caught.value.message.replace(name, "…"))
    assert errors[0] == errors[1]


def test_a_hidden_field_is_null_in_filters_and_orders(desk: Client) -> None:
    assert desk.count("orders", "/client/iban = 'X-EU'") == 0
    assert desk.count("orders", "/client/iban IS NULL") == 1
    assert [record.key for record in desk.query("orders", order_by="/client/iban DESC, /id")] == ["eu"]
    assert b"X-EU" not in desk.get_many("orders", ["eu"], select=["/client/iban"])[0].payload


def test_plans_and_counts_tell_nothing_of_other_rows(desk: Client) -> None:
    plan = desk.explain("orders", "/price > 0")
    assert (plan.filter, plan.index_entries) == ("/price > 0", 0)
    assert "us" not in str(plan)
    topic = desk.describe_topic("orders")
    assert topic.statistics is None or topic.statistics.live_records == 0


def test_a_write_needs_the_rows_before_and_after(root: Client, desk: Client) -> None:
    desk.publish("orders", {"id": "new", "region": "eu"})
    messages = set()
    for document in ({"id": "us", "region": "eu"}, {"id": "mine", "region": "us"}, {"id": "eu", "region": "us"}):
        with pytest.raises(PermissionDenied) as caught:
            desk.publish("orders", document)
        messages.add(caught.value.message)
    assert len(messages) == 1, "nobody learns whether there is a hidden record"
    with pytest.raises(NotFound):
        desk.touch("orders", "us", ttl="1h")
    assert desk.sow_delete("orders", keys=["us"]).deleted == 0
    assert desk.sow_delete("orders", all=True).deleted == 2
    assert [record.key for record in root.query("orders")] == ["us"]


def test_a_record_that_leaves_the_rows_is_told_without_its_payload(root: Client, desk: Client) -> None:
    with desk.sow_and_subscribe("orders", oof=True) as changes:
        seen = []
        for change in changes:
            seen.append((change.op, change.reason, None if change.record is None else change.record.payload))
            if change.op == "snapshot_end":
                root.publish("orders", {"id": "us", "region": "us", "price": 3})
                root.publish("orders", {"id": "eu", "region": "us", "client": {"iban": "SECRET"}})
            if change.op == "oof":
                break
    assert seen[-1] == ("oof", "not_permitted", b"")
    assert not any(b"iban" in (payload or b"") or b"us" in (payload or b"") for _, _, payload in seen)


def test_exports_and_ranges_of_changes_are_restricted(server: ServerProcess, root: Client, desk: Client) -> None:
    export = desk.open_export("orders")
    batches = [batch for part in range(len(export.parts)) for batch in desk.read_export(export.id, part)]
    assert [batch.count for batch in batches] == [1]
    assert b"iban" not in bytes(batches[0].payloads)
    with client_of(server, "other") as other, pytest.raises(NotFound):
        list(other.read_export(export.id, 0))
    desk.close_export(export.id)
    with desk.subscribe("orders", changes=True, start="earliest") as changes:
        root.publish("orders", {"id": "end", "region": "eu"})
        for change in changes:
            row = change.record or change.previous
            assert row is not None
            assert b"iban" not in row.payload
            assert row.key != "us"
            if row.key == "end":
                break


def test_a_pattern_follows_permitted_topics_only(root: Client, desk: Client) -> None:
    with desk.sow_and_subscribe(topic_pattern=".*") as changes:
        for change in changes:
            if change.op == "snapshot_end":
                break
            assert change.topic == "orders"


# --- what may be done ------------------------------------------------------------------------------------------------


def test_what_acts_on_a_whole_topic_needs_all_of_it(desk: Client) -> None:
    for act in (
        lambda: desk.delete_topic("orders"),
        lambda: desk.alter_topic("orders", max_age="1h"),
        lambda: desk.create_topic("mine"),
        desk.status,
        lambda: desk.backup("x"),
        desk.reload_access,
    ):
        with pytest.raises((PermissionDenied, NotFound)):
            act()


def test_a_durable_belongs_to_its_identity(server: ServerProcess, root: Client, desk: Client) -> None:
    with client_of(server, "other") as other:
        with desk.durable("orders", "mine", start="earliest") as consumer:
            next(iter(consumer))
        assert [durable.name for durable in desk.durables("orders")] == ["mine"]
        assert other.durables("orders") == []
        with pytest.raises(NotFound):
            other.delete_durable("orders", "mine")
        assert [durable.name for durable in root.durables("orders")] == ["desk/mine"]
    root.delete_durable("orders", "desk/mine", force=True)


def test_limits_hold_for_each_identity(server: ServerProcess, root: Client) -> None:
    with client_of(server, "few") as few:
        with few.sow_and_subscribe("orders") as first:
            next(iter(first))
            with pytest.raises(ResourceExhausted) as caught, few.subscribe("orders", retry_for=0) as second:
                next(iter(second))
        assert caught.value.details["limit"] == "subscriptions"
        few.open_publisher("a")
        few.open_publisher("b")
        with pytest.raises(ResourceExhausted, match="publishers"):
            few.open_publisher("c")


# --- changing it -----------------------------------------------------------------------------------------------------


def test_a_reload_is_whole_or_nothing_and_ends_the_streams_that_it_concerns(tmp_path: Path) -> None:
    write_access(tmp_path, ACCESS)
    with ServerProcess(tmp_path, GUARDED) as server, client_of(server, "root") as root:
        root.create_topic("orders", key=["/id"])
        root.publish("orders", {"id": "eu", "region": "eu"})
        root.publish("orders", {"id": "us", "region": "us"})
        with client_of(server, "desk") as desk, desk.sow_and_subscribe("orders", retry_for=20) as changes:
            rows = iter(changes)
            first = next(rows).record
            assert first is not None
            assert first.key == "eu"
            assert [session.identity for session in root.sessions() if "Subscribe" in session.calls] == ["desk"]

            (tmp_path / "auth.toml").write_text("[[identities]]\nname = 1\n")
            with pytest.raises(InvalidArgument, match="name: expected"):
                root.reload_access()
            assert root.whoami().name == "root"

            write_access(tmp_path, ACCESS.replace("/region = 'eu'", "/region = 'us'"))
            server.signal(signal.SIGHUP)
            keys = set()
            for change in rows:
                if change.record is not None:
                    keys.add(change.record.key)
                if "us" in keys:
                    break
            write_access(tmp_path, ACCESS.replace(identity("desk", "desk"), ""))
            assert root.reload_access()[1] == 1
            with pytest.raises(PermissionDenied):
                desk.count("orders")


def test_an_export_with_more_than_its_owner_may_see_by_now_is_gone(tmp_path: Path) -> None:
    """Story: an export kept the rows and fields of the moment in which it was opened, whatever was loaded later."""
    write_access(tmp_path, ACCESS)
    with ServerProcess(tmp_path, GUARDED) as server, client_of(server, "root") as root:
        root.create_topic("orders", key=["/id"])
        root.publish("orders", {"id": "eu", "region": "eu"})
        with client_of(server, "desk") as desk:
            first, second = desk.open_export("orders"), desk.open_export("orders")
            write_access(tmp_path, ACCESS + grant("desk", "elsewhere", "read"))
            root.reload_access()

            def counts(client: Client) -> list[int]:
                parts = range(len(first.parts))
                return [batch.count for part in parts for batch in client.read_export(first.id, part)]

            assert counts(desk) == [1], "its part of the topic is the same"
            for changed in ("/region = 'us'", "/client/name"):
                which = "/region = 'eu'" if changed.startswith("/region") else "/client/iban"
                write_access(tmp_path, ACCESS.replace(which, changed))
                root.reload_access()
                assert reason_of(lambda: list(desk.read_export(first.id, 0))) == "EXPORT_NOT_FOUND"
                assert reason_of(lambda: desk.renew_export(second.id)) == "EXPORT_NOT_FOUND"
            desk.close_export(second.id)
            assert counts(root) == [1], "an operator reaches it"
            assert reason_of(lambda: root.renew_export(second.id)) == "EXPORT_NOT_FOUND"


def test_the_audit_log_has_denials_and_administration_and_no_content(server: ServerProcess, desk: Client) -> None:
    with pytest.raises(NotFound):
        desk.count("secret", "/x = 'CANARY'")
    desk.sow_delete("orders", filter="/price = 12345")
    refused(server, "CANARY-TOKEN")
    events = audited(server.config.parent)
    denied = [event for event in events if event["event"] == "denied" and event.get("topic") == "secret"]
    assert denied[-1]["identity"] == "desk"
    assert any(event["method"].endswith("SowDelete") and event["event"] == "end" for event in events)
    assert any(event["event"] == "authentication_failed" for event in events)
    text = str(events)
    assert "CANARY" not in text
    assert "12345" not in text
    for part in Part:
        assert oct(audit_file(server.config.parent, part).stat().st_mode & 0o777) == "0o600"


def test_check_access_names_the_line_that_decides(root: Client) -> None:
    found = root.check_access("desk", "publish", "orders", record='{"id":"x","region":"eu"}')
    assert found.allowed
    assert "roles.desk.grants[0]" in found.decided_by
    assert not root.check_access("desk", "publish", "orders", record='{"id":"x","region":"us"}').allowed
    assert root.check_access("desk", "load", "orders").decided_by == ""


# --- peers -----------------------------------------------------------------------------------------------------------


def test_a_peer_is_who_its_credential_says(tmp_path: Path) -> None:
    """Story: with one secret or authority for all, every peer could pose as any other."""
    write_access(tmp_path / "nyc", peer("ldn", "orders") + peer("par"))
    accepts = GUARDED.replace("[server]", '[server]\ninstance = "nyc"') + '[replication]\naccept = ["ldn", "par"]\n'
    with ServerProcess(tmp_path / "nyc", accepts) as nyc, client_of(nyc, "root") as there:
        there.create_topic("orders", key=["/id"])
        there.create_topic("other", key=["/id"])

        def instance(name: str, token: str) -> ServerProcess:
            folder = tmp_path / f"{name}-{token}"
            folder.mkdir()
            (folder / "token").touch(0o600)
            (folder / "token").write_text(token)
            links = f'[[replication.peers]]\nname = "nyc"\naddress = "{nyc.address}"\ntoken_file = "token"\n'
            topics = '[topics.orders]\nkey = ["/id"]\n[topics.other]\nkey = ["/id"]\n'
            return ServerProcess(folder, f'[server]\ninstance = "{name}"\n{links}{topics}')

        with instance("ldn", "par") as impostor, impostor.client() as client:
            client.publish("orders", {"id": 1})
            until(lambda: "PEER_NOT_ACCEPTED" in str(client.replication_status()), 20, "the impostor to be refused")
            assert there.count("orders") == 0
        with instance("ldn", "ldn") as honest, honest.client() as client:
            client.publish("orders", {"id": 2})
            client.publish("other", {"id": 3})
            until(lambda: there.count("orders") == 1, 20, "the record of the peer")
            assert there.count("other") == 0, "the peer may not send this topic"
