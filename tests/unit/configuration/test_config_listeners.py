"""The configuration of listeners: both forms, the needs of each listener, and their effects."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_server.config import ListenerAuth, ListenerConfig, Overrides, TlsConfig, load, render
from sow_server.engine.values.model import MICROS
from tests.support.servers.certificates import Authority
from tests.support.servers.configs import Write, refusal, write

__all__ = ["write"]  # a fixture

LOCAL = "[[server.listeners]]\nlisten = '127.0.0.1:7450'\n"


@pytest.fixture
def pair(tmp_path: Path) -> str:
    """The keys that name a certificate and its key; `ca.pem` is their authority."""
    authority = Authority(tmp_path, "ca")
    authority.issue("server")
    (tmp_path / "crl.pem").write_bytes(authority.revocations([]))
    return "certificate = 'server.pem'\nkey = 'server.key'\n"


ACCESS = "[access]\nfile = 'auth.toml'\n"
"""Listeners that ask for tokens need it; nothing reads it here."""
SIGNED = "[access.jwt]\njwks = 'keys.json'\nissuer = 'https://id.bank'\naudience = 'sow'\n"
MUTUAL = "client_ca = 'ca.pem'\n"


def reachable(*lines: str) -> str:
    """A listener that other machines reach."""
    return "[[server.listeners]]\nlisten = '0.0.0.0:7451'\n" + "".join(lines)


# --- two forms -------------------------------------------------------------------------------------------------------


def test_the_short_form_is_one_listener(write: Write, pair: str, tmp_path: Path) -> None:
    assert load(None).listeners == (ListenerConfig("127.0.0.1:7450"),)
    found = load(write(f"[server.tls]\n{pair}{MUTUAL}revoked = 'crl.pem'\n"), Overrides(listen="0.0.0.0:1"))
    certificate, key, ca, crl = (tmp_path / name for name in ("server.pem", "server.key", "ca.pem", "crl.pem"))
    assert found.tls == TlsConfig(certificate, key, ca, crl)
    assert found.listeners == (ListenerConfig("0.0.0.0:1", ListenerAuth.CERTIFICATE, certificate, key, ca, crl),)
    assert found.listeners[0].links
    assert load(write(render(found))) == found


def test_listeners_are_read_with_all_that_they_say(write: Write, pair: str, tmp_path: Path) -> None:
    text = (
        LOCAL
        + reachable(pair, MUTUAL, "revoked = 'crl.pem'\nlinks = false\nmax_concurrent_rpcs = 7\nmax_connections = 8\n")
        + f"[[server.listeners]]\nlisten = '0.0.0.0:7452'\nauth = 'jwt'\n{pair}"
    )
    text += ACCESS + SIGNED
    found = load(write(text))
    local, mutual, signed = found.listeners
    assert local == ListenerConfig("127.0.0.1:7450")
    assert mutual == ListenerConfig(
        "0.0.0.0:7451",
        ListenerAuth.CERTIFICATE,
        tmp_path / "server.pem",
        tmp_path / "server.key",
        tmp_path / "ca.pem",
        tmp_path / "crl.pem",
        links=False,
        max_concurrent_rpcs=7,
        max_connections=8,
    )
    assert (signed.auth, signed.client_ca) == (ListenerAuth.JWT, None)
    assert load(write(render(found))) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nlisten = '127.0.0.1:1'\n", "[server] listen: contradicts [[server.listeners]]"),
        ("[server]\nauth = 'none'\n", "[server] auth: contradicts [[server.listeners]]"),
        ("[server.tls]\n{pair}", "[server.tls]: contradicts [[server.listeners]]"),
    ],
)
def test_both_forms_at_once_are_refused(write: Write, pair: str, text: str, message: str) -> None:
    assert message in refusal(write(text.replace("{pair}", pair) + LOCAL))


def test_an_address_on_the_command_line_cannot_stand_for_listeners(write: Write) -> None:
    assert "--listen: contradicts [[server.listeners]]" in refusal(write(LOCAL), Overrides(listen="127.0.0.1:1"))


# --- needs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "listen: 0.0.0.0:7451 is reachable from other machines: let clients prove who they are"),
        ("{pair}", "listen: 0.0.0.0:7451 is reachable from other machines: let clients prove who they are"),
        ("auth = 'token'\n", 'auth: "token" needs TLS where other machines reach 0.0.0.0:7451'),
        ("auth = 'jwt'\n", 'auth: "jwt" needs TLS where other machines reach 0.0.0.0:7451'),
        ("auth = 'certificate'\n{pair}", 'auth: "certificate" needs client_ca of its own'),
        ("auth = 'none'\n{pair}{mutual}", 'auth: "none" contradicts client_ca'),
        ("certificate = 'server.pem'\n", "certificate: also needs key"),
        ("key = 'server.key'\n", "key: also needs certificate"),
        ("{mutual}", "client_ca: also needs certificate"),
        ("{pair}revoked = 'crl.pem'\n", "revoked: also needs client_ca"),
        ("revoked = 'crl.pem'\n", "revoked: also needs client_ca"),
        ("auth = 'tokens'\n", 'auth: expected one of "none", "certificate", "token", "jwt"'),
        ("tls = true\n", "tls: unknown key"),
    ],
)
def test_a_listener_that_cannot_be_is_refused_by_name(write: Write, pair: str, lines: str, message: str) -> None:
    said = refusal(write(reachable(lines.replace("{pair}", pair).replace("{mutual}", MUTUAL))))
    assert said.startswith(f"sow.toml: [server.listeners] {message}")
    assert said.endswith('(listener "0.0.0.0:7451")')


def test_the_short_form_is_refused_in_its_own_words(write: Write, pair: str) -> None:
    assert refusal(write("[server]\nauth = 'certificate'\n")).startswith(
        'sow.toml: [server] auth: "certificate" needs client_ca in [server.tls]'
    )
    assert '[server] auth: "none" contradicts client_ca' in refusal(
        write(f"[server]\nauth = 'none'\n[server.tls]\n{pair}{MUTUAL}")
    )


def test_insecure_opens_every_address(write: Write) -> None:
    for lines in ("", "auth = 'token'\n", "auth = 'jwt'\n"):
        text = reachable(lines) + ACCESS + SIGNED
        assert load(write(text), Overrides(insecure=True)).listeners[0].files is None


def test_on_the_loopback_a_token_needs_no_tls(write: Write) -> None:
    assert load(write(LOCAL + "auth = 'token'\n" + ACCESS)).listeners[0].auth is ListenerAuth.TOKEN


def test_listeners_are_tables_with_addresses_of_their_own(write: Write) -> None:
    assert "[server] listeners: expected tables, each under the heading" in refusal(write("[server]\nlisteners = 1"))
    assert "[server.listeners] listen: is missing (listener number 2)" in refusal(
        write(LOCAL + "[[server.listeners]]\nlinks = false\n")
    )
    assert "[server.listeners] listen: 127.0.0.1:7450 is the address of two listeners" in refusal(write(LOCAL + LOCAL))
    chosen = LOCAL.replace("7450", "0")
    assert len(load(write(chosen + chosen)).listeners) == 2
    assert "[metrics] listen: 127.0.0.1:7450 is the server's own" in refusal(
        write(LOCAL + "[metrics]\nlisten = '127.0.0.1:7450'\n")
    )


# --- effects ---------------------------------------------------------------------------------------------------------


def test_reflection_is_served_where_everybody_is(write: Write, pair: str) -> None:
    assert load(write(LOCAL)).reflects
    assert not load(write(LOCAL + reachable(pair, MUTUAL))).reflects
    assert load(write("[server]\nreflection = true\n" + LOCAL + reachable(pair, MUTUAL))).reflects
    found = load(write("[server]\nreflection = false\n"))
    assert not found.reflects
    assert load(write(render(found))) == found


LINKED = "[server]\ninstance = 'a'\n[replication]\naccept = ['b']\n"


def test_links_are_to_be_proved_wherever_other_machines_reach_them(write: Write, pair: str) -> None:
    """R11: by a credential of its own. Story: whoever had a certificate of the authority could pose as any peer. A
    listener without links needs none."""
    open_to_all = reachable(pair, MUTUAL)
    assert "[access] file: is needed, because other machines reach 0.0.0.0:7451" in refusal(
        write(LINKED + LOCAL + open_to_all)
    )
    assert load(write(LINKED + LOCAL + open_to_all + "links = false\n")).replicates
    assert load(write(LINKED + LOCAL + open_to_all + ACCESS)).replicates


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "[access] file: is needed where a listener has auth ="),
        ("[access]\nfile = 'auth.toml'\n", "[access.jwt]: is needed where a listener has auth ="),
        (
            "[access]\nfile = 'auth.toml'\n[access.jwt]\njwks = 'keys'\nissuer = 'a'\n",
            "[access.jwt] audience: is missing",
        ),
    ],
)
def test_tokens_need_what_they_are_checked_with(write: Write, more: str, message: str) -> None:
    assert message in refusal(write(f"[server]\nauth = 'jwt'\n{more}"))


def test_a_jwt_is_never_checked_with_a_shared_secret(write: Write) -> None:
    """Every server that checks such tokens could also make them; and `none` would be no check."""
    for algorithm in ("HS256", "none"):
        text = ACCESS + SIGNED.replace("[access.jwt]", f"[access.jwt]\nalgorithms = ['{algorithm}']")
        assert "[access.jwt] algorithms: expected one of" in refusal(write(f"[server]\nauth = 'jwt'\n{text}"))


def test_accepted_sources_need_a_listener_with_links(write: Write) -> None:
    assert "[replication] accept: no [[server.listeners]] has links = true" in refusal(
        write(LINKED + LOCAL + "links = false\n")
    )


def test_a_peer_is_no_listener_of_this_server(write: Write) -> None:
    peer = "[[replication.peers]]\nname = 'b'\naddress = '127.0.0.1:7450'\n"
    assert "127.0.0.1:7450 is the server's own" in refusal(write(LOCAL + peer))


def test_bounds_of_connections_are_read(write: Write) -> None:
    found = load(
        write(
            "[server]\nmax_connections = 9\nstreams_per_connection_max = 10\n"
            "max_connection_age = '1h'\nmax_connection_age_grace = '5s'\n"
        )
    )
    assert (found.server.max_connections, found.server.streams_per_connection_max) == (9, 10)
    assert found.server.max_connection_age_micros == 3600 * MICROS
    assert found.server.max_connection_age_grace_micros == 5 * MICROS
    assert load(write(render(found))) == found
    assert load(write(render(load(None)))).server.max_connection_age_micros is None
