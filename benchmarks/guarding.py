"""The cost of access: credentials, one grant, and a grant with rows, against a server without an access file.

Servers with the same records take turns (`turns`). A ratio is that of CPU times, without to with, so 0.97 × means that
the guarded server spends 3 % more on a record or a call.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.comparing import Comparison, Figures, Measurement, measure, row
from benchmarks.documents import documents
from benchmarks.followers import Followers
from benchmarks.processes import TOPIC, SowServer
from benchmarks.publishing import publish
from benchmarks.rows import TIMES, Row, Target
from benchmarks.setting import Setting
from benchmarks.turns import BUYS, Cases, Side
from sow_client import Client, Tls
from tests.support.servers.certificates import Authority

FOLLOWERS: Final = 100
CALLS: Final = 50
"""Single calls of a round."""
LOAD_RECORDS: Final = 100_000
LOADER: Final = "loader"
"""The name, and the token, of an identity that may write all records."""
CALLER: Final = "caller"
OPEN: Final = "no access file"
BY_HAND: Final = "the filter by hand"
TOKEN: Final = "token, one grant"
ROWS: Final = "token, a grant with rows"
TLS: Final = "TLS, no access file"
CERTIFICATE: Final = "certificate, one grant"
GUARDED_TARGET: Final = Target(0.85, f"{TIMES} of without", ambition=0.97)
ROWS_TARGET: Final = Target(0.9, f"{TIMES} of by hand", ambition=1.0)


@dataclass(frozen=True, slots=True)
class _Setup:
    """A server and its callers."""

    auth: str = "none"
    guarded: bool = False
    rows: str = ""
    """The rows of the caller's grant."""
    asked: str = ""
    """The filter that the caller asks with."""
    tls: bool = False


_SETUPS: Final = {
    OPEN: _Setup(),
    BY_HAND: _Setup(asked=BUYS),
    TOKEN: _Setup("token", guarded=True),
    ROWS: _Setup("token", guarded=True, rows=BUYS),
    TLS: _Setup(tls=True),
    CERTIFICATE: _Setup("certificate", guarded=True, tls=True),
}


_WRITES: Final = (
    Comparison(TOKEN, OPEN, GUARDED_TARGET),
    Comparison(CERTIFICATE, TLS, GUARDED_TARGET),
    Comparison(ROWS, OPEN, None),
    Comparison(BY_HAND, OPEN, None),  # the same twice: how much two equal servers differ
)
_READS: Final = (
    Comparison(TOKEN, OPEN, GUARDED_TARGET),
    Comparison(CERTIFICATE, TLS, GUARDED_TARGET),
    Comparison(ROWS, BY_HAND, ROWS_TARGET),
)
_DELIVERIES: Final = tuple(one for one in _READS if one.ours != CERTIFICATE)


def access(setting: Setting) -> Iterator[Row]:
    """Every case on servers with and without access, in turns.

    The servers are started anew several times: two equal ones differ by some percent as long as they run.
    """
    starts = setting.size(3, quick=1)
    rounds = setting.size(4, quick=2)
    cases = Cases(
        records=setting.size(30_000, quick=10_000),
        calls=CALLS,
        delivered=setting.size(5_000, quick=1_000),
        loaded=setting.size(60_000, quick=20_000),
    )
    streams = (
        Measurement(f"stream publish, {cases.records:,} new records", cases.new_keys, _WRITES),
        Measurement(f"stream publish, {cases.records:,} updates", cases.updates, _WRITES),
        Measurement(f"query of the whole topic, {2 * cases.loaded + cases.records:,} records", cases.query, _READS),
        Measurement(f"delete by filter, {cases.records:,} records", cases.deletes, _READS),
    )
    singles = (
        Measurement(f"{CALLS} single publishes", cases.single_publishes, _WRITES),
        Measurement(f"{CALLS} single gets", cases.single_gets, _WRITES),
    )
    deliveries = (
        Measurement(f"{cases.delivered:,} updates to each of {FOLLOWERS} followers", cases.deliveries, _DELIVERIES),
    )
    spent: Figures = {}
    with asyncio.Runner() as runner:
        for start in range(starts):
            setting.say(f"start {start + 1} of {starts}")
            with ExitStack() as stack:
                sides = {
                    name: _side(stack, runner, setting.directory / f"{start}-{number}", setup, cases)
                    for number, (name, setup) in enumerate(_SETUPS.items())
                }
                measure(sides, streams, rounds, spent)
                # A single call costs so much that a few percent of it show only where the sides take turns often.
                measure(sides, singles, 15 * rounds, spent)
                following = {name: side for name, side in sides.items() if side.followers is not None}
                for side in following.values():
                    assert side.followers is not None, "chosen so"
                    side.followers.subscribe([side.filter] * FOLLOWERS)
                measure(following, deliveries, rounds, spent)
    for one in (*streams, *singles, *deliveries):
        for comparison in one.comparisons:
            yield row(one.name, spent[one.name], comparison)


def _side(stack: ExitStack, runner: asyncio.Runner, home: Path, setup: _Setup, cases: Cases) -> Side:
    """A server with records, half of which the caller may see if its grant has rows, and its caller."""
    home.mkdir()
    authority = Authority(home, "authority")
    tables = f'[access]\nfile = "{_access_file(home, setup)}"\n' if setup.guarded else ""
    if setup.tls:
        issued = authority.issue("server")
        tables += f'[server.tls]\ncertificate = "{issued.certificate}"\nkey = "{issued.key}"\n'
        if setup.auth == "certificate":
            tables += f'client_ca = "{authority.file}"\n'
    server = stack.enter_context(SowServer(home, server=f'auth = "{setup.auth}"\n', more=tables))

    def client(name: str) -> Client:
        if not setup.tls:
            return Client(server.address, token=name if setup.guarded else None)
        issued = authority.issue(name)
        return Client(server.address, tls=Tls(authority.file, issued.certificate, issued.key))

    with client(LOADER) as loader:
        for first in range(0, 2 * cases.loaded, LOAD_RECORDS):
            publish(loader, documents(range(first, min(first + LOAD_RECORDS, 2 * cases.loaded))), "buffered")
    caller, publisher = ((("authorization", f"Bearer {name}"),) if setup.guarded else () for name in (CALLER, LOADER))
    followers = Followers(server.address, metadata=caller, publishing=publisher, runner=runner)
    if not setup.tls:
        stack.enter_context(followers)
    return Side(server, stack.enter_context(client(CALLER)), setup.asked, None if setup.tls else followers)


def _access_file(home: Path, setup: _Setup) -> Path:
    file = home / "auth.toml"
    file.touch(0o600)
    lines: list[str] = []
    for name, rows in ((LOADER, ""), (CALLER, setup.rows)):
        proof = (
            f'certificate = "CN:{name}"'
            if setup.tls
            else f'token_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"'
        )
        lines += ["[[identities]]", f'name = "{name}"', proof, f'roles = ["{name}"]']
        lines += [f"[[roles.{name}.grants]]", f"topics = '{TOPIC}'", 'allow = ["read", "publish", "delete"]']
        lines += [f'rows = "{rows}"'] if rows else []
    file.write_text("\n".join(lines) + "\n")
    return file
