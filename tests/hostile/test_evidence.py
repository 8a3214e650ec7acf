"""The audit log and the taking away of access survive an insider, on a real server (rules A6, A8)."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import grpc
import httpx
import pytest

from sow.v1 import access_pb2, admin_pb2, sow_pb2
from sow_client import Client
from sow_console.sessions import ATTEMPTS_MAX
from sow_server.access.audit import Part
from sow_server.access.authorizer import DENIALS_TOLD_MAX
from tests.support.oracles.access import GUARDED, audit_file, audited, client_of, grant, identity, write_access
from tests.support.oracles.methods import METHODS, OpenCall, attempt, opened
from tests.support.servers.certificates import Authority, Issued, replace
from tests.support.servers.console import running_console
from tests.support.servers.jwts import AUDIENCE, ISSUER, Issuer
from tests.support.servers.open_streams import End, Stream, end_of
from tests.support.servers.server import ServerProcess, free_port, reason_of, until

CHANGED: Final = End(grpc.StatusCode.UNAVAILABLE, "ACCESS_CHANGED")
"""The end of a stream whose caller has no access any more."""
DESK: Final = grant("desk", "orders", "read publish delete consume")
SMALL: Final = 'audit_bytes_max = "64KiB"\naudit_files = 1\n'
"""Two files of each part, of so many bytes: a flood needs no time to go round."""
SUBSCRIBE: Final = "sow.v1.SowService.Subscribe"
FOLLOW: Final = sow_pb2.SubscribeRequest(topic="orders", sow=True).SerializeToString()


def subscribed(channel: grpc.Channel, token: str = "") -> OpenCall:
    """A subscription that stands. It has a minute."""
    call = opened(channel, METHODS[SUBSCRIBE], iter([FOLLOW]), token=token, timeout=60)
    next(call)
    return call


def ends(call: OpenCall) -> End:
    return end_of(Stream(call, lambda: None))


# --- a flood of lines ------------------------------------------------------------------------------------------------

DENIED: Final = {
    "sow.v1.SowService.Get": sow_pb2.GetRequest(topic="orders", keys=["1"]),
    "sow.v1.SowService.SowDelete": sow_pb2.SowDeleteRequest(topic="orders"),
    "sow.v1.AdminService.AlterTopic": admin_pb2.AlterTopicRequest(name="orders"),
    "sow.v1.AdminService.CreateTopic": admin_pb2.CreateTopicRequest(name="t" * 200),
    "sow.v1.AdminService.DeleteDurable": admin_pb2.DeleteDurableRequest(topic="orders", name="d" * 200),
    "sow.v1.AccessService.ListSessions": access_pb2.ListSessionsRequest(),
    "sow.v1.AdminService.Compact": admin_pb2.CompactRequest(),
}
"""Calls that an identity without any grant makes."""


@pytest.mark.parametrize("rounds", [60, pytest.param(3_000, marks=pytest.mark.long)])
def test_who_may_nothing_pushes_no_line_out_of_the_log(tmp_path: Path, rounds: int) -> None:
    """Story: an identity without any grant wrote 1,100 denials of 485 bytes a second into the file that had the lines
    of administrators, until these were gone."""
    write_access(tmp_path, identity("nobody") + identity("desk", "desk") + DESK)
    with ServerProcess(tmp_path, GUARDED + SMALL) as server:
        with client_of(server, "root") as root:
            root.create_topic("orders", key=["/id"])
            root.reload_access()
        denied = 0
        with grpc.insecure_channel(server.address) as channel:
            for _ in range(rounds):
                for name, request in DENIED.items():
                    found = attempt(channel, METHODS[name], [request.SerializeToString()], token="nobody")
                    assert found.reason in ("TOPIC_NOT_FOUND", "PERMISSION_DENIED")
                    denied += 1
        with client_of(server, "desk") as desk:
            for number in range(rounds * 4):
                desk.sow_delete("orders", keys=[str(number)])
            assert reason_of(lambda: desk.count("secret")) == "TOPIC_NOT_FOUND"
        assert server.terminate() == 0
        administration = audited(tmp_path, Part.ADMINISTRATION)
        assert [(line["event"], line["method"].rpartition("/")[2]) for line in administration] == [
            ("begin", "ReloadAccess"),
            ("end", "ReloadAccess"),
        ]
        assert any("SowDelete" in line["method"] for line in audited(tmp_path, Part.CALLS))
        assert "nobody" not in audit_file(tmp_path, Part.CALLS).read_text()
        refused = audited(tmp_path, Part.REFUSALS)
        assert any(line["identity"] == "desk" for line in refused), "others are told as before"
        told = sum(line["event"] == "denied" and line["identity"] == "nobody" for line in refused)
        counted = sum(line["denials_not_told"] for line in refused if line["event"] == "denials")
        if rounds < 1_000:  # within a minute
            assert (told, counted) == (DENIALS_TOLD_MAX, denied - DENIALS_TOLD_MAX)
        else:
            assert counted > told


def test_no_name_of_a_caller_makes_a_long_line(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path, "one")
    write_access(tmp_path, identity("desk", "desk") + DESK)
    jwt, token = free_port(), free_port()
    config = (
        f"[[server.listeners]]\nlisten = '127.0.0.1:{token}'\nauth = 'token'\n"
        f"[[server.listeners]]\nlisten = '127.0.0.1:{jwt}'\nauth = 'jwt'\n"
        f"[access]\nfile = 'auth.toml'\naudit = 'audit.jsonl'\naudit_reads = true\n{issuer.config}"
    )
    with ServerProcess(tmp_path, config, port=token) as server:
        with Client(f"127.0.0.1:{jwt}", token=issuer.token("\u2603" * 600)) as client:
            assert reason_of(client.whoami) == "UNAUTHENTICATED"
        with client_of(server, "desk") as desk:
            for name in ("n" * 200, "n" * 10_000, "\u2603" * 200):
                for call in (
                    lambda name=name: desk.count(name),
                    lambda name=name: desk.delete_durable("orders", name),
                    lambda name=name: desk.delete_durable(name, "x"),
                    lambda name=name: desk.sow_delete(name, keys=["1"]),
                ):
                    reason_of(call)
        written = [line for part in Part for line in audit_file(tmp_path, part).read_bytes().splitlines()]
        assert len(written) > 10
        assert max(map(len, written)) < 2_000


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB. Skips where mounting is not allowed."""
    folder = tmp_path / "log"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"mounting a tmpfs is not allowed here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def test_access_can_be_taken_away_while_the_disk_of_the_log_is_full(tmp_path: Path, small_disk: Path) -> None:
    filler = small_disk / "filler"

    def fill(server: ServerProcess) -> None:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 512)

    _takes_access_away(tmp_path, small_disk, fill, lambda server: filler.unlink())


def test_access_can_be_taken_away_while_the_file_of_the_log_cannot_grow(tmp_path: Path) -> None:
    """The same by a limit of the process, where no file system can be mounted."""
    folder = tmp_path / "log"
    folder.mkdir()
    # As large as no other file of the server gets here.
    (folder / "audit.jsonl").write_text(json.dumps({"event": "x" * 2**21, "method": ""}) + "\n")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(server: ServerProcess) -> None:
        size = (folder / "audit.jsonl").stat().st_size
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, hard))

    _takes_access_away(
        tmp_path, folder, limit, lambda server: resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
    )


def _takes_access_away(
    tmp_path: Path, log: Path, fill: Callable[[ServerProcess], object], free: Callable[[ServerProcess], object]
) -> None:
    """Story: with a full disk of the audit log neither a reload nor the end of a session was possible, so an insider
    with a stolen token kept it, as long as the disk was full."""
    tokens = identity("stolen", "desk") + identity("other", "desk") + DESK
    write_access(tmp_path, tokens)
    config = GUARDED.replace('"audit.jsonl"', f'"{log / "audit.jsonl"}"')
    with ServerProcess(tmp_path, config + "[topics.orders]\nkey = ['/id']\n") as server, ExitStack() as connections:
        root = connections.enter_context(client_of(server, "root"))

        def follow(name: str) -> OpenCall:
            channel = connections.enter_context(grpc.insecure_channel(server.address))
            return subscribed(channel, name)

        first, other = follow("stolen"), follow("other")
        fill(server)
        assert reason_of(root.compact) == "AUDIT_UNAVAILABLE", "the disk is full"
        stolen = [one for one in root.sessions() if one.identity == "stolen"]
        assert root.end_session(stolen[0].id) == 1
        assert ends(first) == CHANGED
        second = follow("stolen")
        write_access(tmp_path, tokens.replace(identity("stolen", "desk"), ""))
        assert root.reload_access()[1] == 1
        assert ends(second) == CHANGED
        write_access(tmp_path, "")
        server.signal(signal.SIGHUP)
        assert ends(other) == CHANGED
        until(lambda: len(server.events("access_reloaded")) == 2, 30, "the reload by a signal")
        assert reason_of(root.compact) == "AUDIT_UNAVAILABLE", "it is full still"
        free(server)
        wanted = ["EndSession", "ReloadAccess", "SIGHUP"]

        def told() -> list[tuple[str, str]]:
            lines = (log / "audit.jsonl").read_text().splitlines()
            return [(line["event"], line["method"].rpartition("/")[2]) for line in map(json.loads, lines)]

        until(lambda: ("end", "SIGHUP") in told(), 30, "the lines that wait")
        assert [line for line in told() if line[1] in wanted] == [
            (event, method) for method in wanted for event in ("begin", "end")
        ]
        root.compact()
        assert not server.faults()


def test_a_reload_by_a_signal_is_told(tmp_path: Path) -> None:
    """Story: SIGHUP changed what everybody may do, and the audit log had nothing of it."""
    write_access(tmp_path, identity("desk", "desk") + DESK)
    with ServerProcess(tmp_path, GUARDED) as server:
        server.signal(signal.SIGHUP)
        until(lambda: server.events("access_reloaded"), 30, "the reload")
        (tmp_path / "auth.toml").write_text("x")
        server.signal(signal.SIGHUP)
        until(lambda: server.events("access_reload_failed"), 30, "the refusal")
        assert server.terminate() == 0
    lines = audited(tmp_path, Part.ADMINISTRATION)
    assert {(line["method"], line["credential"]) for line in lines} == {("SIGHUP", "signal")}
    assert [(line["event"], line.get("code")) for line in lines] == [
        ("begin", None),
        ("end", "OK"),
        ("begin", None),
        ("end", "INVALID_ARGUMENT"),
    ]
    assert (lines[1]["identities"], lines[1]["ended_calls"]) == (2, 0)


# --- anchors of trust that go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["removed", "replaced", "removed and reloaded", "all removed"])
def test_a_key_that_goes_ends_what_it_has_admitted(tmp_path: Path, act: str) -> None:
    """Story: whoever had connected by a JWT whose key was taken back kept its streams until the token expired, and a
    reload did not change that."""
    issuers = {name: Issuer(tmp_path, name) for name in ("stolen", "other", "late")}
    keys = {name: json.loads(issuer.file.read_text())["keys"][0] for name, issuer in issuers.items()}
    file = tmp_path / "keys.json"
    replace(file, json.dumps({"keys": [keys["stolen"], keys["other"]]}).encode())
    names = "".join(f'[[identities]]\nname = "{name}"\njwt = "{name}"\nroles = ["desk"]\n' for name in issuers)
    write_access(tmp_path, names + DESK)
    plain, port = free_port(), free_port()
    config = (
        f"[[server.listeners]]\nlisten = '127.0.0.1:{plain}'\nauth = 'token'\n"
        f"[[server.listeners]]\nlisten = '127.0.0.1:{port}'\nauth = 'jwt'\n"
        f"[access]\nfile = 'auth.toml'\naudit = 'audit.jsonl'\n"
        f"[access.jwt]\njwks = '{file}'\nissuer = '{ISSUER}'\naudience = '{AUDIENCE}'\n[topics.orders]\nkey = ['/id']\n"
    )
    left = {
        "removed": [keys["other"]],
        "removed and reloaded": [keys["other"]],
        "replaced": [keys["other"], keys["late"] | {"kid": "stolen"}],
        "all removed": [],
    }[act]
    with ServerProcess(tmp_path, config, port=plain) as server, ExitStack() as connections:
        channels = [connections.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")) for _ in issuers]
        tokens = {name: issuer.token(name) for name, issuer in issuers.items()}
        ending, staying = subscribed(channels[0], tokens["stolen"]), subscribed(channels[1], tokens["other"])
        replace(file, json.dumps({"keys": left}).encode())
        if act == "removed and reloaded":
            with client_of(server, "root") as root:
                root.reload_access()
        assert ends(ending) == CHANGED
        found = attempt(channels[0], METHODS[SUBSCRIBE], [FOLLOW], token=tokens["stolen"])
        assert found.reason == "UNAUTHENTICATED"
        if left:
            assert staying.is_active()
            assert attempt(channels[1], METHODS[SUBSCRIBE], [FOLLOW], token=tokens["other"]).reason == ""
        else:
            assert ends(staying) == CHANGED
        assert not server.faults()


WAYS: Final = ("certificates", "tokens behind certificates", "certificates without an access file")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("act", ["authority", "revoked"])
def test_an_authority_that_goes_and_a_revoked_certificate_end_what_they_have_admitted(
    tmp_path: Path, way: str, act: str
) -> None:
    """Story: connections outlived their authority. A revoked certificate was refused only where callers are known by
    it: not where they show a token besides, and not without an access file."""
    old, kept = Authority(tmp_path, "old"), Authority(tmp_path, "kept")
    between = old.signs(Authority(tmp_path, "between"))
    server_files = kept.issue("server")
    stolen, other = between.issue("stolen"), kept.issue("other")
    stolen_chain = stolen.pem + between.file.read_bytes()
    authorities, revoked = tmp_path / "clients.pem", tmp_path / "revoked.pem"
    both = old.file.read_bytes() + between.file.read_bytes() + kept.file.read_bytes()
    replace(authorities, both if act == "revoked" else old.file.read_bytes() + kept.file.read_bytes())
    replace(revoked, between.revocations([]) if act == "revoked" else kept.revocations([]))
    names = "".join(
        f'[[identities]]\nname = "{name}"\ncertificate = "CN:{name}"\nroles = ["desk"]\n'
        if way == "certificates"
        else identity(name, "desk")
        for name in ("stolen", "other")
    )
    write_access(tmp_path, names + DESK)
    auth = '[server]\nauth = "token"\n' if way.startswith("tokens") else ""
    access = '[access]\nfile = "auth.toml"\n' if "without" not in way else ""
    config = (
        f'{auth}[server.tls]\ncertificate = "{server_files.certificate}"\nkey = "{server_files.key}"\n'
        f'client_ca = "{authorities}"\nrevoked = "{revoked}"\n{access}[topics.orders]\nkey = ["/id"]\n'
    )
    with ServerProcess(tmp_path, config) as server, ExitStack() as connections:

        def connected(issued: Issued, chain: bytes) -> grpc.Channel:
            credentials = grpc.ssl_channel_credentials(kept.file.read_bytes(), issued.key.read_bytes(), chain)
            return connections.enter_context(grpc.secure_channel(server.address, credentials))

        channels = connected(stolen, stolen_chain), connected(other, other.pem)
        ending, staying = subscribed(channels[0], "stolen"), subscribed(channels[1], "other")
        if act == "revoked":
            replace(revoked, between.revocations([stolen]))
        else:
            replace(authorities, kept.file.read_bytes())
        assert ends(ending) == CHANGED
        found = attempt(channels[0], METHODS[SUBSCRIBE], [FOLLOW], token="stolen")
        assert found.reason == "UNAUTHENTICATED", "on the connection that stands"
        assert ("revoked" if act == "revoked" else "authority") in found.text
        assert staying.is_active()
        assert attempt(channels[1], METHODS[SUBSCRIBE], [FOLLOW], token="other").reason == ""
        again = attempt(connected(stolen, stolen_chain), METHODS[SUBSCRIBE], [FOLLOW], token="stolen", timeout=10)
        assert again.code is not grpc.StatusCode.OK, "nor does a new one help"
        assert not server.faults()


# --- log-ins at the console ------------------------------------------------------------------------------------------


def test_failed_log_ins_lock_nobody_out_of_the_console(tmp_path: Path) -> None:
    """Story: five failed log-ins locked out their address. All people behind a proxy have one."""
    write_access(tmp_path, identity("desk", "desk") + DESK)
    with ServerProcess(tmp_path, GUARDED) as server, running_console(server.address) as console:
        address = {"Origin": console.address}

        def guess(number: int) -> int:
            with console.browser() as browser:
                return browser.post("/login", data={"token": f"guess {number}"}, headers=address).status_code

        with ThreadPoolExecutor(20) as pool:
            assert set(pool.map(guess, range(ATTEMPTS_MAX * 4))) == {403}
            guesses = [pool.submit(guess, number) for number in range(ATTEMPTS_MAX * 2)]
            browser = console.logged_in("desk")
            assert browser.get("/").status_code == 303
            browser.close()
            assert {each.result() for each in guesses} == {403}
        with httpx.Client(base_url=console.address) as browser:
            assert browser.get(f"/{server.address}/overview").headers["location"].startswith("/login")
