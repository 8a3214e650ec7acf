"""The authorizer: who is admitted, sessions, reloads, limits that are given back, the audit log (rules A1 to A8)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from sow_server.access.audit import Part
from sow_server.access.authorizer import DENIALS_TOLD_MAX, Listener, end_calls
from sow_server.access.credentials import Anonymous, Claim, Shown, Tokens
from sow_server.access.failed_attempts import PER_MINUTE, TOLD_MAX, WAIT_SECONDS, host_of
from sow_server.access.limits import DESCRIPTIONS_MORE
from sow_server.access.needs import NEEDS, Action
from sow_server.engine.commit.pace import CallsUnderWay
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.turns import CALLER
from sow_server.services.door.capacity import InFlight
from sow_server.services.door.guard import CallAdmission
from sow_server.services.door.received import Context
from tests.support.oracles.access import grant, identity, peer
from tests.support.oracles.access_parts import HERE, Guarded, LastingTask, access_of

LIMITS = "[roles.desk.limits]\nrpcs = 2\nrequests_per_second = 100\n"
DESK = identity("desk", "desk") + grant("desk", "orders", "read publish delete load")
OTHER = identity("other", "other") + grant("other", "orders", "read")
ADMIN = identity("admin", "admin") + '[[roles.admin.grants]]\nallow = ["operator", "observe"]\n'
PEER = peer("ldn")
FILE = DESK + OTHER + ADMIN + PEER


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    return Guarded(access_of(tmp_path, FILE + LIMITS))


def refusal(guarded: Guarded, method: str, token: str = "", address: str = HERE) -> StoreError:
    with pytest.raises(StoreError) as caught:
        guarded.admit(method, token, address)
    return caught.value


def rpcs_held(guarded: Guarded, name: str) -> int:
    return guarded.authorizer.usage_of(guarded.authorizer.identities[name]).held("rpcs")


# --- who is admitted -------------------------------------------------------------------------------------------------


def test_health_is_open_and_has_no_session(guarded: Guarded) -> None:
    call, session = guarded.admit("Check")
    assert (call.owner, session) == ("", None)
    guarded.authorizer.finished(call, session, "OK")
    assert list(guarded.authorizer.sessions()) == []


def test_a_call_without_a_known_credential_is_counted_and_audited(guarded: Guarded) -> None:
    assert refusal(guarded, "Get").reason is Reason.UNAUTHENTICATED
    assert refusal(guarded, "Get", "CANARY").reason is Reason.UNAUTHENTICATED
    assert guarded.counted.failed == 2
    told = guarded.audit.of("authentication_failed")
    assert [line["address"] for line in told] == [HERE, HERE]
    assert "CANARY" not in str(guarded.audit.lines)
    assert list(guarded.authorizer.sessions()) == []


def test_many_failed_attempts_are_told_as_a_number(guarded: Guarded) -> None:
    for _ in range(TOLD_MAX + 7):
        refusal(guarded, "Get", "guess")
    assert len(guarded.audit.of("authentication_failed")) == TOLD_MAX
    guarded.clocks.seconds += 60
    guarded.authorizer.look()
    assert guarded.audit.of("authentications_failed") == [
        {"event": "authentications_failed", "address": "ipv4:10.0.0.1", "attempts_not_told": 7}
    ]
    assert guarded.counted.failed == TOLD_MAX + 7, "the metric has each"


def test_the_last_counts_are_told_before_the_log_is_closed(guarded: Guarded) -> None:
    for _ in range(TOLD_MAX + 1):
        refusal(guarded, "Get", "guess")
    guarded.authorizer.close()
    assert guarded.audit.of("authentications_failed")[0]["attempts_not_told"] == 1
    assert guarded.audit.closed


def test_an_expired_identity_is_unauthenticated_from_its_microsecond_on(tmp_path: Path) -> None:
    file = access_of(tmp_path, identity("desk", "r", more="expires = 2027-01-15T08:00:10Z") + grant("r", "t", "read"))
    guarded = Guarded(file)
    guarded.clocks.seconds = 9.999999
    call, _ = guarded.admit("Get", "desk")
    assert call.expire_micros == guarded.clocks.now_micros() + 1
    guarded.clocks.seconds = 10
    assert refusal(guarded, "Get", "desk").reason is Reason.UNAUTHENTICATED


def test_only_peers_replicate_and_a_peer_is_no_identity(guarded: Guarded) -> None:
    call, _ = guarded.admit("Replicate", "ldn")
    assert call.peer is not None
    assert (call.peer.name, call.owner) == ("ldn", "ldn")
    assert refusal(guarded, "Replicate", "admin").reason is Reason.PERMISSION_DENIED
    assert guarded.audit.of("denied")[-1]["identity"] == "admin"
    assert refusal(guarded, "Get", "ldn").reason is Reason.UNAUTHENTICATED


def test_the_kind_of_a_credential_is_the_listeners(guarded: Guarded) -> None:
    """A call with a good token on a listener that asks for none is nobody."""
    with pytest.raises(StoreError) as caught:
        guarded.admit("Get", "desk", prover=Anonymous())
    assert caught.value.reason is Reason.UNAUTHENTICATED


def test_anonymous_is_an_identity_of_the_file(tmp_path: Path) -> None:
    text = '[[identities]]\nname = "anonymous"\nroles = ["r"]\nexpires = 2027-01-16\n' + grant("r", "t", "read")
    guarded = Guarded(access_of(tmp_path, text))
    call, _ = guarded.admit("Get", prover=Anonymous())
    assert (call.owner, call.credential) == ("anonymous", "none")
    guarded.clocks.seconds = 86_400
    with pytest.raises(StoreError) as caught:
        guarded.admit("Get", prover=Anonymous())
    assert caught.value.reason is Reason.UNAUTHENTICATED, "its date holds, too"


def test_without_an_access_file_everybody_is_admitted_and_nothing_is_audited() -> None:
    guarded = Guarded(None)
    call, session = guarded.admit("ReloadAccess", "whatever")
    assert call.unrestricted
    assert session is not None
    guarded.authorizer.finished(call, session, "OK")
    assert guarded.audit.lines == []
    assert list(guarded.authorizer.sessions()) == []


# --- failed attempts wait --------------------------------------------------------------------------------------------


class FailingContext:
    """gRPC's context of a call with a token."""

    def __init__(self, token: str, address: str = HERE) -> None:
        self._token = token
        self._address = address

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token}"),)

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return self._address

    def time_remaining(self) -> None:
        return None


class NoRpcs:
    def rpc_finished(self, method: str, code: str, seconds: float) -> None:
        pass


def test_failed_attempts_wait_and_a_good_caller_at_the_same_address_does_not(guarded: Guarded) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    admission = CallAdmission(
        Listener(guarded.authorizer, Tokens()),
        NoRpcs(),
        InFlight(10**9),
        calls_max=100,
        message_bytes_max=10**6,
        publishes=CallsUnderWay(),
        sleep=sleep,
    )

    async def attempt(token: str) -> None:
        path = "/sow.v1.SowService/Get"
        await admission.admit(path, NEEDS[path], cast(Context, FailingContext(token)))

    async def main() -> None:
        for _ in range(PER_MINUTE):
            with pytest.raises(StoreError):
                await attempt("guess")
        assert slept == []
        with pytest.raises(StoreError) as caught:
            await attempt("guess")
        assert caught.value.reason is Reason.UNAUTHENTICATED
        assert slept == [WAIT_SECONDS]
        await attempt("desk")
        assert slept == [WAIT_SECONDS]

    asyncio.run(main())


def test_without_an_access_file_a_caller_with_a_credential_is_its_host() -> None:
    """Story: it was taken for the server itself, so the clients of all hosts were one caller, without turns."""
    guarded = Guarded(None)
    admission = CallAdmission(
        Listener(guarded.authorizer, Tokens()),
        NoRpcs(),
        InFlight(10**9),
        calls_max=100,
        message_bytes_max=10**6,
        publishes=CallsUnderWay(),
    )

    async def main() -> None:
        path = "/sow.v1.SowService/Get"
        context = cast(Context, FailingContext("any"))
        await admission.admit(path, NEEDS[path], context)
        assert CALLER.get() == host_of(context.peer())

    asyncio.run(main())


# --- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_is_one_credential_from_one_connection(guarded: Guarded) -> None:
    first, at = guarded.admit("Get", "desk")
    second, same = guarded.admit("Query", "desk")
    other, elsewhere = guarded.admit("Get", "other", "ipv4:10.0.0.1:5001")
    assert same is at
    assert [(session.identity, len(session.calls)) for session in guarded.authorizer.sessions()] == [
        ("desk", 2),
        ("other", 1),
    ]
    guarded.authorizer.finished(first, at, "OK")
    assert len(list(guarded.authorizer.sessions())) == 2
    guarded.authorizer.finished(second, same, "OK")
    guarded.authorizer.finished(other, elsewhere, "OK")
    assert list(guarded.authorizer.sessions()) == []


def test_ending_a_session_ends_the_calls_that_last(guarded: Guarded) -> None:
    stream, session = guarded.lasting("Subscribe", "desk")
    once, _ = guarded.admit("Publish", "desk")
    assert session is not None
    assert end_calls(session, StoreError(Reason.ACCESS_CHANGED, "ended")) == 1
    assert stream.ended is not None
    assert once.ended is None, "a write that was begun is answered"


def test_streams_end_when_their_credential_expires(tmp_path: Path) -> None:
    text = identity("desk", "r", more="expires = 2027-01-15T08:00:10Z") + OTHER + grant("r", "t", "read")
    guarded = Guarded(access_of(tmp_path, text))
    mine, _ = guarded.lasting("Subscribe", "desk")
    others, _ = guarded.lasting("Subscribe", "other")
    ended = []
    for seconds in (9.9, 10, 11):
        guarded.clocks.seconds = seconds
        guarded.authorizer.look()
        ended.append(mine.ended)
    assert [None if error is None else error.reason for error in ended] == [None, *[Reason.ACCESS_CHANGED] * 2]
    assert ended[1] is ended[2], "once"
    assert others.ended is None


@pytest.mark.parametrize("method", ["Subscribe", "Replicate"])
def test_streams_end_when_their_credential_is_withdrawn(guarded: Guarded, method: str) -> None:
    """A6, also those of peers; other credentials on the same connection stay."""
    name = "ldn" if method == "Replicate" else "desk"
    gone: list[str] = []

    class Withdrawable(Tokens):
        def prove(self, shown: Shown) -> Claim:
            claim = super().prove(shown)
            return claim._replace(withdrawn=lambda: "was signed with a key that has gone" if gone else "")

    call, _ = guarded.admit(method, name, prover=Withdrawable())
    call.runs(cast("asyncio.Task[object]", LastingTask()))
    other, _ = guarded.lasting("Subscribe", "other")
    assert guarded.authorizer.look() == 0
    gone.append("gone")
    assert guarded.authorizer.look() == 1
    assert call.ended is not None
    assert (call.ended.reason, call.ended.message) == (
        Reason.ACCESS_CHANGED,
        "the token of this caller was signed with a key that has gone",
    )
    assert other.ended is None


# --- reloads ---------------------------------------------------------------------------------------------------------

NARROWER = grant("desk", "orders", "read publish delete load", "hide = ['/client/iban']")


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (FILE, []),
        ("# a comment moves all lines\n\n" + FILE, []),
        (OTHER + ADMIN + PEER + DESK, []),
        (FILE + LIMITS, []),
        (FILE.replace("desk = ", "desk  = "), []),
        (FILE.replace('["desk"]', '["renamed"]').replace("roles.desk.", "roles.renamed."), []),
        (DESK.replace("load", "create") + OTHER + ADMIN + PEER, ["desk"]),
        (DESK.replace('"load"', '"load", "create"') + OTHER + ADMIN + PEER, ["desk"]),
        (FILE + NARROWER, ["desk"]),
        (FILE + "[[roles.desk.grants]]\ntopics = 'secret'\ndeny = ['read']\n", ["desk"]),
        (FILE.replace('roles = ["other"]', 'roles = ["other", "desk"]'), ["other"]),
        (OTHER + ADMIN + PEER + grant("desk", "t", "read"), ["desk"]),
        (identity("desk", "desk", more="expires = 2027-06-01") + FILE.replace(identity("desk", "desk"), ""), ["desk"]),
        (FILE.replace(PEER, peer("ldn", "orders")), ["ldn"]),
        (FILE.replace(PEER, ""), ["ldn"]),
        ("", ["desk", "other", "ldn"]),
    ],
)
def test_a_reload_ends_exactly_the_streams_that_it_concerns(tmp_path: Path, text: str, ended: list[str]) -> None:
    """Story: a line more at the top of the file ended the streams of all callers, because grants know their lines."""
    guarded = Guarded(access_of(tmp_path, FILE))
    calls = {
        "desk": guarded.lasting("Subscribe", "desk")[0],
        "other": guarded.lasting("Subscribe", "other")[0],
        "ldn": guarded.lasting("Replicate", "ldn")[0],
    }
    assert guarded.authorizer.replace(access_of(tmp_path, text)) == len(ended)
    assert [name for name, call in calls.items() if call.ended is not None] == ended
    assert {call.ended.reason for call in calls.values() if call.ended is not None} <= {Reason.ACCESS_CHANGED}


def test_after_a_reload_new_calls_are_judged_by_the_new_file(guarded: Guarded, tmp_path: Path) -> None:
    guarded.admit("ReloadAccess", "admin")
    guarded.authorizer.replace(access_of(tmp_path, DESK + identity("admin")))
    assert refusal(guarded, "ReloadAccess", "admin").reason is Reason.PERMISSION_DENIED
    assert refusal(guarded, "Get", "other").reason is Reason.UNAUTHENTICATED
    assert refusal(guarded, "Replicate", "ldn").reason is Reason.UNAUTHENTICATED


def test_a_reload_changes_limits_and_keeps_what_is_in_use(guarded: Guarded, tmp_path: Path) -> None:
    first, session = guarded.admit("Get", "desk")
    guarded.admit("Get", "desk")
    assert refusal(guarded, "Get", "desk").reason is Reason.LIMIT_EXCEEDED
    guarded.authorizer.replace(access_of(tmp_path, FILE + LIMITS.replace("rpcs = 2", "rpcs = 3")))
    guarded.admit("Get", "desk")
    assert refusal(guarded, "Get", "desk").reason is Reason.LIMIT_EXCEEDED
    guarded.authorizer.replace(access_of(tmp_path, FILE + LIMITS.replace("rpcs = 2", "rpcs = 1")))
    guarded.authorizer.finished(first, session, "OK")
    assert rpcs_held(guarded, "desk") == 2
    assert refusal(guarded, "Get", "desk").details["value"] == "1"
    guarded.authorizer.replace(access_of(tmp_path, FILE))
    guarded.admit("Get", "desk")


def test_a_rate_that_a_reload_brings_does_not_refuse_the_next_call(tmp_path: Path) -> None:
    """Story: a caller without a rate had no allowance, and its first call after the reload was refused."""
    guarded = Guarded(access_of(tmp_path, FILE))
    guarded.admit("Get", "desk")
    guarded.authorizer.replace(access_of(tmp_path, FILE + LIMITS))
    guarded.admit("Get", "desk")


def test_calls_of_an_identity_that_a_reload_removes_are_finished_in_order(guarded: Guarded, tmp_path: Path) -> None:
    call, session = guarded.admit("Get", "desk")
    guarded.authorizer.replace(access_of(tmp_path, OTHER))
    guarded.authorizer.finished(call, session, "OK")
    guarded.authorizer.replace(access_of(tmp_path, FILE + LIMITS))
    assert rpcs_held(guarded, "desk") == 0


def test_a_call_gives_back_its_own_and_not_what_another_of_its_name_holds(guarded: Guarded, tmp_path: Path) -> None:
    """Story: the call of a peer gave back a call of the identity that had got its name by a reload."""
    call, session = guarded.admit("Replicate", "ldn")
    guarded.authorizer.replace(access_of(tmp_path, identity("ldn", "desk") + DESK))
    guarded.admit("Get", "ldn")
    guarded.authorizer.finished(call, session, "OK")
    assert rpcs_held(guarded, "ldn") == 1


# --- limits are given back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["denied", "audit", "rate"])
def test_a_call_that_is_not_admitted_holds_nothing(tmp_path: Path, fails: str) -> None:
    limits = "[roles.desk.limits]\nrpcs = 1\nrequests_per_second = 1\n"
    guarded = Guarded(access_of(tmp_path, FILE + limits))
    if fails == "rate":
        call, session = guarded.admit("Get", "desk")
        guarded.authorizer.finished(call, session, "OK")
    guarded.audit.fails = fails == "audit"
    wanted = {
        "denied": ("ListSessions", Reason.PERMISSION_DENIED),
        "audit": ("OpenLoad", Reason.AUDIT_UNAVAILABLE),
        "rate": ("Get", Reason.LIMIT_EXCEEDED),
    }
    method, reason = wanted[fails]
    assert refusal(guarded, method, "desk").reason is reason
    assert rpcs_held(guarded, "desk") == 0
    assert list(guarded.authorizer.sessions()) == []
    guarded.clocks.seconds += 1
    guarded.audit.fails = False
    guarded.admit("Get", "desk")


# --- the audit log ---------------------------------------------------------------------------------------------------


def test_administration_is_told_at_its_begin_and_at_its_end(guarded: Guarded) -> None:
    call, session = guarded.admit("ReloadAccess", "admin")
    begin = guarded.audit.of("begin")[0]
    assert (begin["identity"], begin["method"], begin["decision"]) == (
        "admin",
        "/sow.v1.AccessService/ReloadAccess",
        "allowed",
    )
    call.notes.update(identities=3)
    guarded.authorizer.finished(call, session, "OK")
    end = guarded.audit.of("end")[0]
    assert (end["code"], end["identities"], end["fingerprint"]) == ("OK", 3, begin["fingerprint"])


def test_reads_are_told_only_if_asked_for(tmp_path: Path) -> None:
    for wanted in (False, True):
        guarded = Guarded(access_of(tmp_path, FILE), audit_reads=wanted)
        guarded.authorizer.finished(*guarded.admit("Get", "desk"), "OK")
        assert [line["event"] for line in guarded.audit.lines] == (["begin", "end"] if wanted else [])


AUDITED = {path.rpartition("/")[2]: need.action for path, need in NEEDS.items() if need.audited}


WITHDRAWING = {path.rpartition("/")[2] for path, need in NEEDS.items() if need.withdraws}


@pytest.mark.parametrize("method", sorted(WITHDRAWING))
def test_access_can_always_be_taken_away(tmp_path: Path, method: str) -> None:
    """Story: with a full disk of the audit log, a stolen token could not be taken out of use."""
    guarded = Guarded(access_of(tmp_path, FILE))
    guarded.audit.fails = True
    guarded.authorizer.finished(*guarded.admit(method, "admin"), "OK")
    assert [line["event"] for line in guarded.audit.lines] == ["begin", "end"], "its room is reserved"
    guarded.audit.write = lambda *told, **named: False  # type: ignore[method-assign]  # not even that
    guarded.authorizer.finished(*guarded.admit(method, "admin"), "OK")


def test_what_takes_access_away() -> None:
    assert {"ReloadAccess", "EndSession", "EndSubscription", "RemovePeer", "PausePeer"} == WITHDRAWING


@pytest.mark.parametrize("method", sorted(AUDITED.keys() - WITHDRAWING))
def test_what_must_be_audited_is_refused_while_the_log_cannot_be_written(tmp_path: Path, method: str) -> None:
    guarded = Guarded(access_of(tmp_path, FILE), audit_reads=True)
    guarded.audit.fails = True
    token = "ldn" if AUDITED[method] is Action.REPLICATE else "admin"
    refused = refusal(guarded, method, token)
    assert refused.reason is Reason.AUDIT_UNAVAILABLE
    assert refused.retry_after_micros > 0
    guarded.admit("Get", "desk")
    guarded.audit.fails = False
    guarded.admit(method, token)


def test_what_must_be_audited() -> None:
    """Rule A8: administration, deletes, loads, backups, reloads, links; all that change something, but publishes."""
    assert {
        "SowDelete",
        "OpenLoad",
        "CommitLoad",
        "Backup",
        "ReloadAccess",
        "EndSession",
        "Replicate",
    } <= AUDITED.keys()
    assert not {"Get", "Query", "Subscribe", "Publish", "WhoAmI", "Check"} & AUDITED.keys()


def test_denials_of_one_identity_are_told_up_to_a_number_and_then_counted(tmp_path: Path) -> None:
    """Story: an identity without any grant wrote 1,100 denials a second, which pushed all else out of the log."""
    guarded = Guarded(access_of(tmp_path, FILE))
    for _ in range(DENIALS_TOLD_MAX + 7):
        call, session = guarded.admit("Query", "desk", "ipv4:10.0.0.1:5001")
        with pytest.raises(StoreError):
            call.topic("secret")
        guarded.authorizer.finished(call, session, "NOT_FOUND")
    assert len(guarded.audit.of("denied")) == DENIALS_TOLD_MAX
    assert refusal(guarded, "ListSessions", "other").reason is Reason.PERMISSION_DENIED
    assert guarded.audit.of("denied")[-1]["identity"] == "other", "others are told all the same"
    guarded.clocks.seconds += 60
    guarded.authorizer.look()
    assert guarded.audit.of("denials") == [{"event": "denials", "identity": "desk", "denials_not_told": 7}]
    assert len(guarded.counted.denied) == DENIALS_TOLD_MAX + 8, "the metric has each"


@pytest.mark.parametrize("method", ["SowDelete", "CreateTopic", "AlterTopic", "OpenLoad", "DeleteDurable", "Compact"])
def test_who_may_nothing_writes_no_line_but_its_denials(tmp_path: Path, method: str) -> None:
    """Otherwise begin and end of such calls would be a flood of their own."""
    guarded = Guarded(access_of(tmp_path, ADMIN + identity("nobody")))
    for _ in range(DENIALS_TOLD_MAX + 1):
        try:
            call, session = guarded.admit(method, "nobody")
        except StoreError:
            continue
        with pytest.raises(StoreError):
            call.topic("orders")
        guarded.authorizer.finished(call, session, "NOT_FOUND")
    assert [line["event"] for line in guarded.audit.lines] == ["denied"] * DENIALS_TOLD_MAX
    assert set(guarded.audit.parts) == {Part.REFUSALS}


def test_lines_of_administrators_have_a_part_of_their_own(tmp_path: Path) -> None:
    """access/audit [5]: nobody else can make that part grow."""
    text = FILE + identity("curator", "curator") + grant("curator", "orders", "topic-admin consume")
    guarded = Guarded(access_of(tmp_path, text), audit_reads=True)

    def parts(method: str, token: str) -> set[Part]:
        guarded.audit.parts.clear()
        guarded.authorizer.finished(*guarded.admit(method, token), "OK")
        return set(guarded.audit.parts)

    assert parts("ReloadAccess", "admin") == parts("AlterTopic", "curator") == {Part.ADMINISTRATION}
    for method, token in (
        ("SowDelete", "desk"),
        ("OpenLoad", "desk"),
        ("DeleteDurable", "curator"),
        ("Replicate", "ldn"),
        ("Get", "desk"),
        ("GetStatus", "admin"),
        ("AlterTopic", "desk"),
    ):
        assert parts(method, token) == {Part.CALLS}, method
    guarded.audit.parts.clear()
    refusal(guarded, "Get", "CANARY")
    refusal(guarded, "Compact", "desk")
    assert set(guarded.audit.parts) == {Part.REFUSALS}


def test_a_denial_is_told_with_its_topic_and_line(guarded: Guarded) -> None:
    call, _ = guarded.admit("Get", "desk")
    with pytest.raises(StoreError):
        call.topic("secret")
    told = guarded.audit.of("denied")[0]
    assert (told["topic"], told["action"], told["decided_by"]) == ("secret", "read", "")
    assert guarded.counted.denied == [("Get", "read")]


def test_a_call_that_describes_the_instance_takes_no_place_of_another(tmp_path: Path) -> None:
    """A7: a client with several addresses watches the instance in use by such a call. With `rpcs = 1` it took the only
    place, and every other call of the client was refused."""
    guarded = Guarded(access_of(tmp_path, FILE + "[roles.desk.limits]\nrpcs = 1\n"))
    watching = [guarded.admit("DescribeInstance", "desk") for _ in range(1 + DESCRIPTIONS_MORE)]
    call, session = guarded.admit("Get", "desk")
    for method in ("Get", "DescribeInstance"):
        error = refusal(guarded, method, "desk")
        assert (error.reason, error.details["limit"]) == (Reason.LIMIT_EXCEEDED, "rpcs")
    for held in ((call, session), *watching):
        guarded.authorizer.finished(*held, "OK")
    guarded.admit("Get", "desk")
    guarded.admit("DescribeInstance", "desk")


def test_an_identity_that_may_call_nothing_may_not_describe_either(tmp_path: Path) -> None:
    """A7."""
    guarded = Guarded(access_of(tmp_path, FILE + "[roles.desk.limits]\nrpcs = 0\n"))
    assert refusal(guarded, "DescribeInstance", "desk").reason is Reason.LIMIT_EXCEEDED
