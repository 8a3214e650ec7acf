"""The configuration of addresses, TLS and replication."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sow_server import config
from sow_server.config import Config, LinkMode, Overrides, ReplicationConfig, load, render
from sow_server.engine.values.model import MICROS, Durability
from tests.support.servers.configs import Write, refusal, write

__all__ = ["write"]  # a fixture


# --- addresses and TLS -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_a_loopback_address_needs_no_tls(listen: str) -> None:
    assert load(None, Overrides(listen=listen)).server.listen == listen


def test_plain_text_to_other_machines_has_to_be_spelled_out() -> None:
    assert load(None, Overrides(listen="0.0.0.0:7450", insecure=True)).server.insecure


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key, and the key encrypted."""
    folder = tmp_path_factory.mktemp("pems")
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    for command in (
        f"{new} -keyout key.pem -out certificate.pem",
        f"{new} -keyout other.pem -out other-certificate.pem",
        "openssl ec -in key.pem -out encrypted.pem -aes256 -passout pass:secret",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def test_tls_is_read_and_lets_other_machines_in(write: Write, pems: Path) -> None:
    found = load(
        write(
            '[server]\nlisten = "0.0.0.0:7450"\n'
            f'[server.tls]\ncertificate = "{pems}/certificate.pem"\nkey = "{pems}/key.pem"\n'
            f'client_ca = "{pems}/certificate.pem"\n'
        )
    )
    assert found.tls is not None
    assert found.tls.certificate == pems / "certificate.pem"
    assert found.tls.client_ca == pems / "certificate.pem"
    assert load(write(render(found))) == found


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("certificate.pem", "other.pem", None), "[server.tls] key: other.pem is not the key of certificate.pem"),
        (("key.pem", "key.pem", None), "[server.tls] certificate: key.pem holds no certificate in PEM"),
        (("certificate.pem", "encrypted.pem", None), "[server.tls] key: encrypted.pem is encrypted"),
        (("certificate.pem", "certificate.pem", None), "[server.tls] key: certificate.pem holds no private key in PEM"),
        (("certificate.pem", "key.pem", "key.pem"), "[server.tls] client_ca: "),
    ],
)
def test_certificates_that_do_not_fit_are_refused(
    write: Write, pems: Path, lines: tuple[str, str, str | None], message: str
) -> None:
    certificate, key, client_ca = lines
    text = f'[server.tls]\ncertificate = "{pems}/{certificate}"\nkey = "{pems}/{key}"\n'
    if client_ca is not None:
        text += f'client_ca = "{pems}/{client_ca}"\n'
    assert message in refusal(write(text)).replace(f"{pems}/", "")


def test_tls_alone_lets_no_other_machines_in(write: Write, pems: Path) -> None:
    """It hides the traffic, and still serves everybody."""
    tls = f'[server.tls]\ncertificate = "{pems}/certificate.pem"\nkey = "{pems}/key.pem"'
    path = write(f'[server]\nlisten = "0.0.0.0:7450"\n{tls}')
    assert "0.0.0.0:7450 is reachable from other machines: let clients prove who they are" in refusal(path)
    assert load(path, Overrides(insecure=True)).listeners[0].files is not None
    for auth in ("token", "jwt"):
        access = '[access]\nfile = "auth.toml"\n[access.jwt]\njwks = "keys"\nissuer = "i"\naudience = "a"\n'
        text = f'[server]\nlisten = "0.0.0.0:7450"\nauth = "{auth}"\n{tls}\n{access}'
        assert load(write(text)).listeners[0].auth.value == auth


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_on_the_loopback_need_no_protection(write: Write) -> None:
    for listen in ("127.0.0.1:9464", "[::1]:9464", "localhost:9464"):
        assert load(write(f'[metrics]\nlisten = "{listen}"')).metrics.listen == listen


@pytest.mark.parametrize("listen", ["0.0.0.0:9464", "[::]:9464", "10.0.0.1:9464", "sow.example:9464"])
def test_metrics_that_others_reach_need_a_token_or_tls_or_the_word(
    write: Write, pems: Path, tmp_path: Path, listen: str
) -> None:
    """X6."""
    text = f'[metrics]\nlisten = "{listen}"\n'
    message = (
        f"sow.toml: [metrics] listen: {listen} is reachable from other machines: set token_file, or certificate and key"
    )
    assert refusal(write(text)).startswith(message)
    tls = f'certificate = "{pems}/certificate.pem"\nkey = "{pems}/key.pem"\n'
    assert refusal(write(f"{text}[server.tls]\n{tls}")).startswith(message), "that of gRPC protects nothing here"
    secret(tmp_path / "token", "s3cret!\n")
    for path, insecure in (
        (write(text), True),
        (write(text + tls), False),
        (write(text + 'token_file = "token"\n'), False),
        (write(f'{text}token_file = "token"\n{tls}'), False),
    ):
        assert load(path, Overrides(insecure=insecure)).metrics.listen == listen


def test_the_protection_of_the_metrics_is_read(write: Write, pems: Path, tmp_path: Path) -> None:
    secret(tmp_path / "token", "s3cret!\n")
    found = load(
        write(
            '[metrics]\nlisten = "0.0.0.0:9464"\ntoken_file = "token"\n'
            f'certificate = "{pems}/certificate.pem"\nkey = "{pems}/key.pem"\n'
        )
    )
    assert found.metrics.certificate == pems / "certificate.pem"
    assert found.metrics.key == pems / "key.pem"
    assert found.metrics.token_file == tmp_path / "token"
    assert config.metrics_token(found.metrics) == "s3cret!"
    assert load(write(render(found))) == found
    assert config.metrics_token(Config().metrics) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('certificate = "{pems}/certificate.pem"', "[metrics] certificate: also needs key"),
        ('key = "{pems}/key.pem"', "[metrics] key: also needs certificate"),
        (
            'certificate = "c.pem"\nkey = "{pems}/key.pem"',
            "[metrics] certificate: c.pem cannot be read (No such file or directory)",
        ),
        (
            'certificate = "{pems}/certificate.pem"\nkey = "k.pem"',
            "[metrics] key: k.pem cannot be read (No such file or directory)",
        ),
        (
            'certificate = "{pems}/certificate.pem"\nkey = "{pems}/other.pem"',
            "[metrics] key: {pems}/other.pem is not the key of",
        ),
        ('certificate = "{pems}/key.pem"\nkey = "{pems}/key.pem"', "[metrics] certificate: "),
        (
            'certificate = "{pems}/certificate.pem"\nkey = "{pems}/encrypted.pem"',
            "[metrics] key: {pems}/encrypted.pem is encrypted",
        ),
        ('token_file = "none"', "[metrics] token_file: none cannot be read (No such file or directory)"),
        ('token_file = "{pems}"', "cannot be read (Is a directory)"),
        ('token_file = "words"', "[metrics] token_file: words does not hold one line of 1 to 1000 visible ASCII"),
        ('token_file = "shown"', "[metrics] token_file: shown holds a secret, and other users may access it"),
        ('token_file = ""', "[metrics] token_file: expected the path of a file"),
        ('token = "s3cret!"', "[metrics] token: unknown key, did you mean token_file?"),
    ],
)
def test_a_protection_that_protects_nothing_is_refused(
    write: Write, pems: Path, tmp_path: Path, text: str, message: str
) -> None:
    """Whether or not there is a `listen`."""
    message = message.replace("{pems}", str(pems))
    secret(tmp_path / "words", "no token")
    secret(tmp_path / "shown", "s3cret!", 0o644)
    for listen in ("", 'listen = "127.0.0.1:9464"\n'):
        assert message in refusal(write(f"[metrics]\n{listen}{text.replace('{pems}', str(pems))}"))


PEER = """
[server]
instance = "nyc-1"
[[replication.peers]]
name = "ldn-1"
address = "127.0.0.1:7451"
"""


# --- replication -----------------------------------------------------------------------------------------------------


def test_peers_are_read_with_all_that_they_say(write: Write, pems: Path) -> None:
    path = write(
        f"""
        [server]
        instance = "nyc-1"
        [replication]
        accept = ["hkg-1", "syd.1"]
        token = "s3cret!"
        min_sync_peers = 1
        sync_timeout = "2s"
        tombstone_grace = "2h"
        max_clock_skew = "1s"
        peer_max_lag_bytes = "2GiB"
        peer_max_lag_age = "3h"
        [[replication.peers]]
        name = "ldn-1"
        address = "ldn.example:7450"
        topics = "orders|flights\\\\..*"
        mode = "sync"
        filter = "/region = 'eu'"
        ca = "{pems}/certificate.pem"
        certificate = "{pems}/certificate.pem"
        key = "{pems}/key.pem"
        [[replication.peers]]
        name = "tyo-1"
        address = "127.0.0.1:7452"
        """
    )
    found = load(path)
    assert found.replicates
    assert found.replication.accept == ("hkg-1", "syd.1")
    assert config.replication_token(found) == "s3cret!"
    assert found.replication.sync_timeout_micros == 2 * MICROS
    assert found.replication.tombstone_grace_micros == 2 * 3600 * MICROS
    assert found.replication.max_clock_skew_micros == MICROS
    assert found.replication.peer_max_lag_bytes == 2 * 2**30
    assert found.replication.peer_max_lag_age_micros == 3 * 3600 * MICROS
    first, second = found.peers
    assert (first.name, first.address, first.mode) == ("ldn-1", "ldn.example:7450", LinkMode.SYNC)
    assert (first.topics, first.filter) == (r"orders|flights\..*", "/region = 'eu'")
    assert (first.ca, first.key) == (pems / "certificate.pem", pems / "key.pem")
    assert (second.topics, second.mode, second.filter, second.ca) == (".*", LinkMode.ASYNC, "", None)
    assert load(write(render(found))) == found


def test_without_peers_there_is_no_replication_and_its_defaults_are_those_of_the_rules() -> None:
    found = Config()
    assert not found.replicates
    assert found.replication == ReplicationConfig(
        min_sync_peers=1,
        sync_timeout_micros=5 * MICROS,
        tombstone_grace_micros=24 * 3600 * MICROS,
        max_clock_skew_micros=10 * MICROS,
        peer_max_lag_bytes=2**30,
        peer_max_lag_age_micros=24 * 3600 * MICROS,
    )


def test_an_instance_that_only_receives_replicates_too(write: Write) -> None:
    assert load(write('[server]\ninstance = "a"\n[replication]\naccept = ["b"]')).replicates


def secret(path: Path, text: str, mode: int = 0o600) -> Path:
    """Writes a file with a mode."""
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


@pytest.mark.parametrize("text", ["", "two lines\nof text", "a b", "ä", "x" * 1001])
def test_a_file_that_holds_no_token_is_refused(write: Write, tmp_path: Path, text: str) -> None:
    secret(tmp_path / "token", text)
    message = refusal(write(PEER + '[replication]\ntoken_file = "token"'))
    assert "[replication] token_file: token does not hold one line" in message


SECRETS = (
    ("[server.tls] key", '[server.tls]\ncertificate = "certificate.pem"\nkey = "my secret"'),
    ("[replication] token_file", PEER + '[replication]\ntoken_file = "my secret"'),
    (
        "[replication.peers] key",
        PEER + 'ca = "certificate.pem"\ncertificate = "certificate.pem"\nkey = "my secret"',
    ),
)


@pytest.mark.parametrize(("knob", "text"), SECRETS, ids=[knob for knob, _ in SECRETS])
def test_a_secret_that_others_may_access_is_refused_with_the_command_that_mends_it(
    write: Write, pems: Path, tmp_path: Path, knob: str, text: str
) -> None:
    """X5: each permission of the group or of others is one too many, and a link counts as the file it leads to."""
    (tmp_path / "certificate.pem").write_bytes((pems / "certificate.pem").read_bytes())
    content = "s3cret" if "token" in knob else (pems / "key.pem").read_text()
    file = secret(tmp_path / "my secret", content)
    path = write(text)
    load(path)
    for mode in (0o640, 0o620, 0o610, 0o604, 0o602, 0o601, 0o666):
        file.chmod(mode)
        said = refusal(path)
        assert f"{knob}: my secret holds a secret, and other users may access it (mode {mode:04o})" in said
        assert "run: chmod 600 'my secret'" in said
    file.chmod(0o400)
    load(path)
    file.rename(tmp_path / "target")
    file.symlink_to("target")
    load(path)
    (tmp_path / "target").chmod(0o440)
    assert f"{knob}: my secret holds a secret, and other users may access it (mode 0440)" in refusal(path)


@pytest.mark.parametrize(
    ("knob", "text"),
    [
        ("[replication] token", PEER + '[replication]\ntoken = "s3cret"'),
        ("[tracing] endpoint", '[tracing]\nendpoint = "https://sow:s3cret@collector.example:4317"'),
    ],
)
def test_a_configuration_with_a_secret_in_it_is_private_itself(write: Write, knob: str, text: str) -> None:
    """X5. Story: a token stood in a file of mode 0644, and the server started."""
    path = write(text)
    load(path)
    path.chmod(0o644)
    assert f"{knob}: sow.toml holds a secret, and other users may access it (mode 0644)" in refusal(path)
    path.write_text(text.replace("s3cret", "").replace(":@", "@"))
    load(path)


def test_a_token_may_stand_in_a_file_of_its_own(write: Write, tmp_path: Path) -> None:
    secret(tmp_path / "token", "s3cret!\n")
    found = load(write(PEER + '[replication]\ntoken_file = "token"'))
    assert config.replication_token(found) == "s3cret!"
    assert found.replication.token_file == tmp_path / "token"
    assert load(write(render(found))) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PEER + 'mode = "synch"', '[replication.peers] mode: expected one of "async", "sync", found the text "synch"'),
        (PEER + 'topic = "x"', "[replication.peers] topic: unknown key, did you mean topics?"),
        (PEER + 'topics = "a("', '[replication.peers] topics: "a(" is not an RE2 expression'),
        (PEER + 'topics = "(?=a)"', '[replication.peers] topics: "(?=a)" is not an RE2 expression'),
        (PEER + 'filter = "/a >"', "[replication.peers] filter: "),
        (PEER + 'certificate = "c.pem"', "[replication.peers] certificate: also needs key"),
        (PEER + 'key = "k.pem"', "[replication.peers] key: also needs certificate"),
        (PEER + 'certificate = "c.pem"\nkey = "k.pem"', "[replication.peers] certificate: also needs ca"),
        (
            PEER + 'ca = "missing.pem"',
            '[replication.peers] ca: missing.pem cannot be read (No such file or directory) (peer "ldn-1")',
        ),
        (PEER.replace("7451", "0"), "[replication.peers] address: 127.0.0.1:0 names no port"),
        (PEER.replace(":7451", ""), '[replication.peers] address: "127.0.0.1" is not host:port'),
        (PEER.replace("7451", "7450"), "[replication.peers] address: 127.0.0.1:7450 is the server's own"),
        (PEER.replace("127.0.0.1", "10.0.0.1"), "10.0.0.1:7451 is on another machine: set ca for TLS, or allow plain"),
        (PEER.replace("ldn-1", "nyc-1"), '[replication.peers] name: "nyc-1" is this instance itself'),
        (PEER.replace("ldn-1", "_x"), "[replication.peers] name: expected 1 to 100 of"),
        (PEER + '[[replication.peers]]\nname = "ldn-1"\naddress = "127.0.0.1:1"', '"ldn-1" names two peers'),
        (PEER + '[[replication.peers]]\nname = "b"\naddress = "127.0.0.1:7451"', "7451 is the address of two peers"),
        (PEER + '[[replication.peers]]\nname = "b"', '[replication.peers] address: is missing (peer "b")'),
        (PEER + "[[replication.peers]]", "[replication.peers] name: is missing (peer number 2)"),
        (
            "[replication.peers]\nname = 1",
            "[replication] peers: expected tables, each under the heading [[replication.peers]]",
        ),
        (PEER + '[replication]\naccept = ["nyc-1"]', '[replication] accept: "nyc-1" is this instance itself'),
        (PEER + '[replication]\naccept = ["a", "a"]', '[replication] accept: "a" occurs twice'),
        (PEER + '[replication]\naccept = ["_a"]', "[replication] accept: expected 1 to 100 of"),
        (PEER + "[replication]\nmin_sync_peers = 0", "[replication] min_sync_peers: 0 is below the minimum, 1"),
        (
            PEER + "[replication]\nmin_sync_peers = 2",
            'min_sync_peers: 2 is above the number of peers with mode = "sync", 0',
        ),
        (PEER + '[replication]\ntoken = "a b"', "[replication] token: expected up to 1000 visible ASCII characters"),
        (PEER + '[replication]\ntoken = "a"\ntoken_file = "b"', "[replication] token_file: contradicts token"),
        (PEER + '[replication]\ntoken_file = "b"', "[replication] token_file: b cannot be read (No such file"),
        (
            PEER + '[replication]\ntombstone_grace = "1s"',
            "[replication] tombstone_grace: 1s is below the minimum, 1m",
        ),
        (
            PEER.replace("[server]", '[server]\ndurability = "replicated"'),
            '[server] durability: "replicated" needs a peer',
        ),
    ],
)
def test_links_that_cannot_be_are_refused(write: Write, text: str, message: str) -> None:
    assert message in refusal(write(text))


def test_plain_text_to_a_peer_on_another_machine_has_to_be_spelled_out(write: Write) -> None:
    path = write(PEER.replace("127.0.0.1", "10.0.0.1"))
    assert load(path, Overrides(insecure=True)).peers[0].ca is None


def test_peers_of_a_server_that_other_machines_reach_have_credentials_of_their_own(write: Write, pems: Path) -> None:
    """Names alone prove nothing, nor does a secret that all peers share (rule R11)."""
    open_to_all = PEER.replace("[server]", '[server]\nlisten = "0.0.0.0:7450"')
    tls = f'[server.tls]\ncertificate = "{pems}/certificate.pem"\nkey = "{pems}/key.pem"\n'
    mutual = tls + f'client_ca = "{pems}/certificate.pem"\n'
    for more in ("", '[replication]\ntoken = "t"\n', tls, mutual):
        assert "[access] file: is needed" in refusal(write(open_to_all + more), Overrides(insecure=True))
    assert load(write(open_to_all + mutual + '[access]\nfile = "auth.toml"\n')).replicates


def test_replicated_may_be_the_default_durability(write: Write) -> None:
    found = load(write(PEER.replace("[server]", '[server]\ndurability = "replicated"') + 'mode = "sync"'))
    assert found.server.durability is Durability.REPLICATED
