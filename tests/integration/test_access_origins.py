"""Access rows of docs/origins.md: the behaviours of other systems that callers and operators may know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_client import Client, InvalidArgument, NotFound, PermissionDenied
from sow_server.access.credentials import Certificates, Directory, Shown
from sow_server.access.file import load_access
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access, write_private
from tests.support.servers.certificates import Authority
from tests.support.servers.server import ServerProcess

ACCESS = (
    identity("desk", "orders")
    + grant("orders", r"orders\..*", "read publish", "rows = \"/region = 'eu'\"")
    + identity("audit", "all", "not-hr")
    + grant("all", ".*", "read")
    + "[[roles.not-hr.grants]]\ntopics = 'hr'\ndeny = [\"read\"]\n"
)
TOPICS = '[topics."orders.eu"]\nkey = ["/id"]\n[topics.hr]\nkey = ["/id"]\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    write_access(folder, ACCESS)
    with ServerProcess(folder, GUARDED + TOPICS) as made:
        with client_of(made, "root") as root:
            root.publish("hr", {"id": 1})
            root.publish("orders.eu", {"id": 1, "region": "eu"})
            root.publish("orders.eu", {"id": 2, "region": "us"})
        yield made


@pytest.fixture
def root(server: ServerProcess) -> Iterator[Client]:
    with client_of(server, "root") as client:
        yield client


def test_each_topic_and_action_is_entitled_and_nothing_else(server: ServerProcess) -> None:
    """Row Access 1."""
    with client_of(server, "desk") as desk:
        assert desk.count("orders.eu") == 1
        with pytest.raises(NotFound):
            desk.count("hr")
        with pytest.raises(PermissionDenied):
            desk.sow_delete("orders.eu", keys=["1"])


def test_the_filter_of_an_entitlement_is_joined_to_that_of_the_caller(server: ServerProcess) -> None:
    """Row Access 2."""
    with client_of(server, "desk") as desk:
        assert [record.key for record in desk.query("orders.eu", "/id > 0 OR true")] == ["1"]


def test_an_access_file_is_loaded_whole_or_not_at_all(server: ServerProcess, root: Client) -> None:
    """Row Access 3."""
    path = server.config.parent / "auth.toml"
    good = path.read_text()
    try:
        path.write_text(identity("root") + identity("desk", "nothing"))
        with pytest.raises(InvalidArgument, match="nothing was changed"):
            root.reload_access()
        assert root.count("hr") == 1, "root has its role still"
    finally:
        path.write_text(good)
    assert root.reload_access()[0] == 3


def test_a_decision_is_asked_for_without_doing_anything_and_a_caller_asks_who_it_is(
    server: ServerProcess, root: Client
) -> None:
    """Row Access 4."""
    record = '{"id": 3, "region": "eu"}'
    assert root.check_access("desk", "publish", "orders.eu", record=record).allowed
    assert not root.check_access("desk", "publish", "hr", record=record).allowed
    assert root.count("orders.eu") == 2
    with client_of(server, "desk") as desk:
        assert (desk.whoami().name, desk.whoami().roles) == ("desk", ("orders",))


def test_a_deny_beats_every_allow(server: ServerProcess, root: Client) -> None:
    """Row Access 5."""
    with client_of(server, "audit") as audit:
        assert audit.count("orders.eu") == 2
        with pytest.raises(NotFound):
            audit.count("hr")
    assert "roles.not-hr.grants[0]" in root.check_access("audit", "read", "hr").decided_by


def test_the_common_name_of_a_certificate_can_be_the_user(tmp_path: Path) -> None:
    """Rows Access 6 and Access 7: also any other name of it, exactly and with its type."""
    write_private(
        tmp_path / "auth.toml",
        '[[identities]]\nname = "by-cn"\ncertificate = "CN:desk"\nroles = ["r"]\n'
        '[[identities]]\nname = "by-ip"\ncertificate = "IP:127.0.0.1"\nroles = ["r"]\n' + grant("r", "orders", "read"),
    )
    directory = Directory.of(load_access(tmp_path / "auth.toml"))
    authority = Authority(tmp_path, "ca")

    def caller(name: str) -> str | None:
        found = directory.identity(Certificates().prove(Shown(certificate=authority.issue(name).pem)))
        return None if found is None else found.name

    assert caller("other") == "by-ip", "a subject alternative name goes before the common name"
    assert caller("desk") == "by-ip"
    (tmp_path / "auth.toml").write_text((tmp_path / "auth.toml").read_text().replace("IP:127.0.0.1", "IP:127.0.0.2"))
    directory = Directory.of(load_access(tmp_path / "auth.toml"))
    assert caller("desk") == "by-cn"
    assert caller("desk-2") is None, "the whole name"
