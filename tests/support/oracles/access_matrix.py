"""The rights of every kind of caller for every method, found by calling a real server.

[1]  A server with three listeners: tokens, JWTs, certificates. They share one access file.
[2]  First everybody may do everything and makes things of its own. Then the file with the roles is loaded. So a method
     on something of one's own is seen for a caller that has lost the right, too.
[3]  A cell is one word; `LEGEND` explains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import grpc
from google.protobuf.message import Message

from sow.v1 import access_pb2, admin_pb2, load_pb2, snapshot_pb2, sow_pb2, types_pb2
from sow_client import Client
from tests.support.oracles.access import client_of, grant, identity, peer, write_access
from tests.support.oracles.access_cases import CASES, NO_BOOKMARK, OWNER, PEERS, Case, Things, policy
from tests.support.oracles.methods import METHODS, Ended, OpenCall, attempt, opened
from tests.support.servers.certificates import Authority, Issued
from tests.support.servers.jwts import Issuer
from tests.support.servers.server import ServerProcess, free_port

LEGEND: Final = """\
# Rights of each caller. tests/integration/test_access_matrix.py makes this table by calling a server, and compares.
# To rewrite it after a change of rights:
#     SOW_REWRITE_TABLES=1 .venv/bin/python -m pytest -n 0 tests/integration/test_access_matrix.py
# Then review the difference: each cell must follow from rules A1 to A7.
#
# passes   the call is allowed
# nothing  the call is allowed, and the answer has or changes nothing
# absent   the answer is the one for something that does not exist
# denied   PERMISSION_DENIED
# unknown  UNAUTHENTICATED
# closed   the connection is refused
# Any other word is the reason for which the call is refused.
"""
SUBSCRIBE: Final = METHODS["sow.v1.SowService.Subscribe"]
ROLES: Final = ("read", "consume", "publish", "delete", "create", "load", "topic-admin", "observe", "operator")
ROWS: Final = "rows = \"/region = 'eu'\""
ON_TOPICS: Final = "read consume publish delete create load topic-admin"
STRANGERS: Final = {
    "no_token": "no credential",
    "guessed": "a token that the access file does not have",
    "expired": "a token that has expired",
    "jwt_late": "a JWT that has expired",
    "jwt_aud": "a JWT for another audience",
    "jwt_iss": "a JWT of another issuer",
    "jwt_key": "a JWT signed with another key",
    "jwt_sub": "a JWT of somebody whom the access file does not have",
    "cert_new": "a certificate of the authority that the access file does not name",
    "cert_gone": "a certificate that is revoked",
    "cert_ca": "a certificate of another authority",
    PEERS[0]: "a peer with a token; it may send the topic orders",
    PEERS[1]: "a peer with a certificate; it may send the topic orders",
}
IDENTITIES: Final = {
    "nobody": "an identity without roles",
    "elsewhere": "every action on other topics",
    **{role: f"only {role}, on every topic" for role in ROLES},
    "rows": "every action on topics, for the records of region eu alone",
    "denied": "every action, but for each of them on topics there is a deny",
    "all": "every action",
    "jwt": "as read, by a JWT",
    "cert": "as read, by a certificate",
}
OWN_CONNECTION: Final = (("grpc.use_local_subchannel_pool", 1),)
ABSENT: Final = frozenset(
    {
        "TOPIC_NOT_FOUND",
        "RECORD_NOT_FOUND",
        "DURABLE_NOT_FOUND",
        "LOAD_NOT_FOUND",
        "EXPORT_NOT_FOUND",
        "PATTERN_MATCHES_NOTHING",
    }
)
DENIED: Final = frozenset({"PERMISSION_DENIED", "PEER_NOT_ACCEPTED"})


@dataclass(frozen=True, slots=True)
class Caller:
    """A column of the table."""

    name: str
    channel: grpc.Channel
    token: str = ""


@dataclass(slots=True)
class World:
    """The server, its callers, and the things that they make requests about."""

    folder: Path
    server: ServerProcess = field(init=False)
    callers: dict[str, Caller] = field(init=False, default_factory=dict)
    things: dict[str, Things] = field(init=False, default_factory=dict)
    _victim: OpenCall | None = field(init=False, default=None)
    _open: ExitStack = field(init=False, default_factory=ExitStack)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    # -- set-up -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        tokens, jwts, mutual = free_port(), free_port(), free_port()
        authority, other = Authority(self.folder, "ca"), Authority(self.folder, "other-ca")
        issuer, forger = Issuer(self.folder, "keys"), Issuer(self.folder, "forged")
        shown = authority.issue("server")
        gone = authority.issue("gone")
        (self.folder / "revoked.pem").write_bytes(authority.revocations([gone]))
        config = _config(tokens, jwts, mutual, shown, authority, issuer)
        self._write(everything=True)
        self.server = self._open.enter_context(ServerProcess(self.folder, config, port=tokens, start=False))
        self.server.module = "tests.support.servers.clocked_server"
        self.server.start()

        def plain(port: int) -> grpc.Channel:
            return self._open.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", OWN_CONNECTION))

        def certified(name: str, by: Authority = authority) -> grpc.Channel:
            issued = by.issue(name) if name != "gone" else gone
            credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), issued.key.read_bytes(), issued.pem)
            return self._open.enter_context(grpc.secure_channel(f"127.0.0.1:{mutual}", credentials))

        token_channel, jwt_channel = plain(tokens), plain(jwts)
        made = [
            Caller("no_token", token_channel),
            Caller("guessed", token_channel, "guessed"),
            Caller("expired", token_channel, "expired"),
            Caller("jwt_late", jwt_channel, issuer.token("jwt", seconds=-10)),
            Caller("jwt_aud", jwt_channel, issuer.token("jwt", audience="another")),
            Caller("jwt_iss", jwt_channel, issuer.token("jwt", issuer="https://another")),
            Caller("jwt_key", jwt_channel, forger.token("jwt")),
            Caller("jwt_sub", jwt_channel, issuer.token("stranger")),
            Caller("cert_new", certified("cert_new")),
            Caller("cert_gone", certified("gone")),
            Caller("cert_ca", certified("cert", other)),
            Caller(PEERS[0], token_channel, PEERS[0]),
            Caller(PEERS[1], certified(PEERS[1])),
            *(Caller(name, token_channel, name) for name in IDENTITIES if name not in ("jwt", "cert")),
            Caller("jwt", jwt_channel, issuer.token("jwt")),
            Caller("cert", certified("cert")),
            Caller(OWNER, token_channel, OWNER),
            Caller("root", token_channel, "root"),
        ]
        self.callers = {caller.name: caller for caller in made}
        with client_of(self.server, "root") as root:
            self._make_things(root)
            self._write(everything=False)
            root.reload_access()

    def _write(self, *, everything: bool) -> None:
        text = "".join(grant(role, ".*", role) if role not in ("observe", "operator") else "" for role in ROLES)
        text += "".join(f'[[roles.{role}.grants]]\nallow = ["{role}"]\n' for role in ("observe", "operator"))
        text += grant("elsewhere", "elsewhere", ON_TOPICS)
        text += grant("rows", ".*", ON_TOPICS, ROWS)
        text += grant("rows_first", ".*", "read consume", ROWS) + grant("rows_first", ".*", "load")
        text += grant("all", ".*", f"{ON_TOPICS} observe operator")
        text += "[roles.all.limits]\nloads = 100\nexports = 64\n[roles.rows_first.limits]\nloads = 100\n"
        denies = ", ".join(f'"{action}"' for action in ON_TOPICS.split())
        text += grant("denied", ".*", ON_TOPICS) + f"[[roles.denied.grants]]\ntopics = '.*'\ndeny = [{denies}]\n"
        for name in (*IDENTITIES, OWNER):
            role = "all" if everything or name == OWNER else name
            if name in ("jwt", "cert"):
                credential = 'jwt = "jwt"' if name == "jwt" else 'certificate = "CN:cert"'
                role = role if role == "all" else "read"
                text += f'[[identities]]\nname = "{name}"\n{credential}\nroles = ["{role}"]\n'
            elif name == "rows" and everything:
                text += identity(name, "rows_first")
            elif name == "nobody" and not everything:
                text += identity(name)
            else:
                text += identity(name, role)
        text += identity("expired", "all", more="expires = 2020-01-01")
        text += peer(PEERS[0], "orders")
        text += f'[[peers]]\nname = "{PEERS[1]}"\ncertificate = "CN:{PEERS[1]}"\ntopics = "orders"\n'
        write_access(self.folder, text)

    def _make_things(self, root: Client) -> None:
        for topic in ("orders", "secret", "loaded", *(f"doomed-{name}" for name in self.callers)):
            root.create_topic(topic, key=["/id"], expiration="enabled")
        root.publish("orders", {"id": "eu", "region": "eu"})
        root.publish("orders", {"id": "us", "region": "us"})
        for name in self.callers:
            root.publish("orders", {"id": f"d-{name}", "region": "eu"})
            for key in (f"us-{name}", f"us-d-{name}"):
                root.publish("orders", {"id": key, "region": "us"})
            self._policy(f"doomed-{name}")
        self._policy("kept")
        (head,) = self._call(
            "root", "SnapshotService.PlanChanges", snapshot_pb2.PlanChangesRequest(topic="orders", latest=True)
        )
        assert isinstance(head, snapshot_pb2.PlanChangesResponse)
        self._pin(OWNER, "kept", head.head_bookmark)
        shared = self._loads_and_exports(OWNER)
        for name in (*STRANGERS, *IDENTITIES):
            self._pin(OWNER, f"doomed-{name}", head.head_bookmark)
            foreign = self._loads_and_exports(OWNER) if name in IDENTITIES else shared
            own = self._loads_and_exports(name) if name in IDENTITIES else shared
            loads = own[0] | {"another's": foreign[0]["own"], "another's commit": foreign[0]["commit"]}
            exports = {"own": own[1], "another's": foreign[1]}
            session, handed = "", NO_BOOKMARK
            if name in IDENTITIES:
                self._pin(name, "rewind", head.head_bookmark)
                self._pin(name, "doomed", head.head_bookmark)
                session, handed = self._consume(name)
            self.things[name] = Things(name, loads, exports, session=session, handed=handed, head=head.head_bookmark)

    def _policy(self, name: str) -> None:
        self._call("root", "AdminService.SetPolicy", admin_pb2.SetPolicyRequest(policy=policy(name)))

    def _pin(self, caller: str, name: str, bookmark: str) -> None:
        self._call(
            caller,
            "SnapshotService.PinJournal",
            snapshot_pb2.PinJournalRequest(topic="orders", name=name, bookmark=bookmark),
        )

    def _loads_and_exports(self, caller: str) -> tuple[dict[str, str], str]:
        loads = {}
        for use in ("own", "commit"):
            (load,) = self._call(caller, "LoadService.OpenLoad", load_pb2.OpenLoadRequest(topic="loaded"))
            assert isinstance(load, load_pb2.OpenLoadResponse)
            loads[use] = load.load_id
        (export,) = self._call(
            caller, "SnapshotService.OpenExport", snapshot_pb2.OpenExportRequest(topic="orders", parts=1)
        )
        assert isinstance(export, snapshot_pb2.OpenExportResponse)
        return loads, export.export_id

    def _consume(self, caller: str) -> tuple[str, str]:
        """Takes the first entry of the durable `ack`; returns the session, and the bookmark of the entry."""
        request = sow_pb2.SubscribeRequest(topic="orders", earliest=True, durable=sow_pb2.DurableAttachment(name="ack"))
        who = self.callers[caller]
        call = opened(who.channel, SUBSCRIBE, iter([request.SerializeToString()]), token=who.token)
        session = ""
        for answer in call:
            if answer.HasField("durable_begin"):
                session = answer.durable_begin.session
            if answer.HasField("changes"):
                call.cancel()
                return session, answer.changes.bookmark
        raise AssertionError("the durable has an entry")

    def _call(self, caller: str, method: str, request: Message) -> list[Message]:
        ended = self.call(caller, method, request)
        assert ended.code is grpc.StatusCode.OK, (caller, method, ended)
        return ended.answers

    def call(self, caller: str, method: str, request: Message) -> Ended:
        """Calls a method, named by its service and name."""
        who = self.callers[caller]
        return attempt(who.channel, METHODS[full_name(method)], [request.SerializeToString()], token=who.token)

    # -- the table ----------------------------------------------------------------------------------------------------

    def ended(self, case: Case, caller: str) -> Ended:
        """The end of the call of a case by a caller."""
        things = self.things[caller]
        if case.method == "AccessService.EndSession":
            things = things._replace(victim=self._victim_session())
        return self.call(caller, case.method, case.request(things))

    def row(self, case: Case, callers: Iterable[str]) -> list[str]:
        """The cells of a case."""
        return [word(self.ended(case, caller), case.fails) for caller in callers]

    # -- content -----------------------------------------------------------------------------------------------------

    def has_durable(self, owner: str, name: str) -> bool:
        """Whether a durable of `orders` exists for its owner."""
        asked = admin_pb2.DescribeDurableRequest(topic="orders", name=name)
        return self.call(owner, "AdminService.DescribeDurable", asked).code is grpc.StatusCode.OK

    def has_load(self, owner: str, load: str) -> bool:
        """Whether a load can still be staged to."""
        ended = self.call(owner, "LoadService.GetLoad", load_pb2.GetLoadRequest(load_id=load))
        return any(
            isinstance(answer, load_pb2.GetLoadResponse) and answer.phase == load_pb2.LOAD_PHASE_STAGING
            for answer in ended.answers
        )

    def has_export(self, owner: str, export: str) -> bool:
        """Whether an export can still be read."""
        asked = snapshot_pb2.RenewExportRequest(export_id=export)
        return self.call(owner, "SnapshotService.RenewExport", asked).code is grpc.StatusCode.OK

    def _victim_session(self) -> str:
        """The id of a session that lasts; a new one if the last was ended."""
        while True:
            (found,) = self._call("root", "AccessService.ListSessions", access_pb2.ListSessionsRequest())
            assert isinstance(found, access_pb2.ListSessionsResponse)
            for session in found.sessions:
                if any(call.method == "Subscribe" for call in session.calls):
                    return session.id
            channel = self._open.enter_context(grpc.insecure_channel(self.server.address, OWN_CONNECTION))
            request = sow_pb2.SubscribeRequest(topic="secret", sow=True).SerializeToString()
            self._victim = opened(channel, SUBSCRIBE, iter([request]), token="root")
            next(self._victim)


def _config(tokens: int, jwts: int, mutual: int, shown: Issued, authority: Authority, issuer: Issuer) -> str:
    """The server of [1], with a port for each listener; `shown`: its certificate."""
    return f"""
[server]
instance = "sow"
dynamic_topics = true
reflection = true
[access]
file = "auth.toml"
[backup]
root = "backups"
[limits]
loads_max = 1000
[replication]
accept = ["par"]
[[replication.peers]]
name = "{PEERS[0]}"
address = "127.0.0.1:1"
[[server.listeners]]
listen = "127.0.0.1:{tokens}"
auth = "token"
[[server.listeners]]
listen = "127.0.0.1:{jwts}"
auth = "jwt"
[[server.listeners]]
listen = "127.0.0.1:{mutual}"
certificate = "{shown.certificate}"
key = "{shown.key}"
client_ca = "{authority.file}"
revoked = "revoked.pem"
{issuer.config}"""


def full_name(method: str) -> str:
    """The full name of a method by its service and name."""
    return next(name for name in METHODS if name.endswith(f".{method}"))


def word(ended: Ended, fails: str = "") -> str:
    """The cell for the end of a call. `fails`: the reason for which it fails once it is allowed."""
    reasons = [ended.reason, *refusals(ended.answers)]
    reason = next(filter(None, reasons), "")
    if reason and reason == fails:
        return "passes"
    if ended.code is grpc.StatusCode.UNAUTHENTICATED:
        return "unknown"
    if reason in DENIED:
        return "denied"
    if reason in ABSENT:
        return "absent"
    if reason:
        return reason
    if ended.code is grpc.StatusCode.UNAVAILABLE:
        return "closed"
    if ended.code is not grpc.StatusCode.OK:
        return ended.code.name
    return "nothing" if is_empty(ended.answers) else "passes"


def refusals(answers: Sequence[Message]) -> Iterator[str]:
    """The reasons for which records were refused though their request was not, and topics though their link was not."""
    for answer in answers:
        found: list[types_pb2.Refusal] = []
        if isinstance(answer, sow_pb2.PublishResponse | sow_pb2.TouchResponse):
            found = [result.refusal for result in answer.results if result.HasField("refusal")]
        elif isinstance(answer, sow_pb2.PublishStreamResponse | load_pb2.StageLoadResponse):
            found = list(answer.refusals)
        for refusal in found:
            yield types_pb2.ErrorReason.Name(refusal.reason).removeprefix("ERROR_REASON_")


LISTS: Final[Mapping[str, str]] = {
    "GetResponse": "records",
    "ListTopicsResponse": "topics",
    "ListDurablesResponse": "durables",
    "ListLoadsResponse": "loads",
    "GetExpiryHorizonResponse": "topics",
    "ListPoliciesResponse": "policies",
}
"""The field with the content of an answer, by the answer's name."""


def is_empty(answers: Sequence[Message]) -> bool:
    """Whether the last answer is one that has content, and has none."""
    last = answers[-1]
    content = LISTS.get(last.DESCRIPTOR.name)
    if content is not None:
        return not getattr(last, content)
    if isinstance(last, sow_pb2.QueryResponse):
        return last.footer.returned == 0
    if isinstance(last, sow_pb2.SowDeleteResponse):
        return last.deleted == 0
    if isinstance(last, sow_pb2.ReadHistoryResponse):
        return len(answers) == 1
    return False


def table(world: World) -> str:
    """The whole table."""
    lines = [LEGEND]
    for columns, what in ((STRANGERS, "that prove no identity"), (IDENTITIES, "that are identities")):
        lines.append(f"# Callers {what}:")
        lines += [f"#     {name:12} {meaning}" for name, meaning in columns.items()]
        lines.append("")
        lines += _aligned([["", *columns], *([case.name, *world.row(case, columns)] for case in CASES)])
        lines.append("")
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
