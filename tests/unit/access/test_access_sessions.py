"""Sessions of callers, as an operator sees them."""

from __future__ import annotations

from sow_server.access.audit import NoAudit
from sow_server.access.authorizer import Authorizer, Session
from sow_server.access.caller import Call
from sow_server.access.credentials import Anonymous, Shown
from sow_server.access.needs import need_of
from sow_server.engine.catalog.topics import Topics

GET = "/sow.v1.SowService/Get"


class _Nobody:
    def authentication_failed(self) -> None:
        raise AssertionError("no credential is asked for")

    def access_denied(self, method: str, action: str) -> None:
        raise AssertionError("everything is allowed")


def _authorizer() -> Authorizer:
    return Authorizer(Topics(), None, NoAudit(), _Nobody(), now_micros=lambda: 0, elapsed=lambda: 0.0)


def _call(authorizer: Authorizer) -> tuple[Call, Session]:
    call, session = authorizer.admit(Anonymous(), GET, need_of(GET), Shown(), "ipv4:127.0.0.1:5000", lambda: None)
    assert session is not None
    return call, session


def test_calls_one_after_the_other_are_one_session_and_none_is_seen_between_them() -> None:
    authorizer = _authorizer()
    first, session = _call(authorizer)
    assert [seen.id for seen in authorizer.sessions()] == [session.id]
    authorizer.finished(first, session, "OK")
    assert list(authorizer.sessions()) == []
    second, again = _call(authorizer)
    assert again is session
    authorizer.forget_idle()
    assert list(authorizer.sessions()) == [session], "one with a call is not forgotten"
    authorizer.finished(second, session, "OK")


def test_a_session_without_calls_is_forgotten() -> None:
    authorizer = _authorizer()
    call, session = _call(authorizer)
    authorizer.finished(call, session, "OK")
    authorizer.forget_idle()
    assert _call(authorizer)[1].id != session.id
