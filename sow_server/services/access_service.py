"""`sow.v1.AccessService`: the identities and the permissions of callers."""

from __future__ import annotations

from collections import Counter

from sow.v1 import access_pb2
from sow_server.access.authorizer import Session, end_calls
from sow_server.access.caller import Call
from sow_server.access.needs import GRANTABLE, SERVER_ACTIONS, Action
from sow_server.access.permissions import Permissions
from sow_server.access_control import AccessControl
from sow_server.engine.catalog.topics import check_name
from sow_server.engine.commit.requests import payload_key
from sow_server.engine.values.errors import Reason, StoreError, no_topic
from sow_server.filters import print_filter, print_path
from sow_server.filters.restriction import Restriction
from sow_server.query.filtering import permitted
from sow_server.services.wire.convert import invalid


class AccessService:
    """Validates, asks the access control, translates."""

    def __init__(self, control: AccessControl) -> None:
        self._control = control

    async def WhoAmI(self, request: access_pb2.WhoAmIRequest, call: Call) -> access_pb2.WhoAmIResponse:
        response = access_pb2.WhoAmIResponse(
            identity=call.owner, credential=call.credential, fingerprint=call.fingerprint
        )
        identity = self._control.authorizer.identities.get(call.owner)
        if identity is not None:
            response.roles.extend([role.name for role in identity.roles])
            response.limits.extend(
                [access_pb2.AccessLimit(name=name, value=value) for name, value in identity.limits.named().items()]
            )
        if call.expire_micros is not None:
            response.expire_time_micros = call.expire_micros
        return response

    async def CheckAccess(self, request: access_pb2.CheckAccessRequest, call: Call) -> access_pb2.CheckAccessResponse:
        if not self._control.authorizer.enforces:
            raise invalid("identity", "this server has no access file, so everybody may do everything")
        permissions = self._control.authorizer.permissions(request.identity)
        if permissions is None:
            raise invalid("identity", f"the access file has no identity {request.identity[:200]!r}")
        known = {action.value: action for action in GRANTABLE}
        action = known.get(request.action)
        if action is None:
            raise invalid("action", f"{request.action[:80]!r} is none of {', '.join(known)}")
        if (action in SERVER_ACTIONS) == bool(request.topic):
            needs = "no topic" if request.topic else "a topic"
            raise invalid("topic", f"{action.value} needs {needs}")
        if request.topic:
            check_name(request.topic)
        return self._decided(permissions, action, request, call)

    def _decided(
        self, permissions: Permissions, action: Action, request: access_pb2.CheckAccessRequest, call: Call
    ) -> access_pb2.CheckAccessResponse:
        decision = permissions.decide(action, request.topic)
        rows, hidden = decision.restriction
        response = access_pb2.CheckAccessResponse(
            allowed=decision.allowed,
            decided_by=decision.place,
            rows="" if rows is None else print_filter(rows),
            hidden=[print_path(steps) for steps in hidden],
        )
        name = permissions.identity.name
        on = f" on {request.topic}" if request.topic else ""
        if not decision.allowed:
            why = "a grant denies it" if decision.place else "no grant allows it"
            if not decision.place and (near := permissions.nearly(action, request.topic)):
                why += f"; the topics of {near} match only a part of this name"
            response.explanation = f"{name} lacks {action.value}{on}: {why}"
        elif request.HasField("payload") and rows is not None:
            self._judge_record(permissions, action, request, call, response)
        else:
            part = "" if rows is None else ", for some rows"
            response.explanation = f"{name} has {action.value}{on}{part}"
        return response

    def _judge_record(
        self,
        permissions: Permissions,
        action: Action,
        request: access_pb2.CheckAccessRequest,
        call: Call,
        response: access_pb2.CheckAccessResponse,
    ) -> None:
        """Tells which grant has the record among its rows."""
        call.cells.check(request.topic)
        topic = call.existing(request.topic)
        if topic is None:
            raise no_topic(request.topic)
        key = request.key.encode()
        if not key and topic.settings.key:
            key = payload_key(topic, request.payload)
        name = permissions.identity.name
        for rows in permissions.rows(action, request.topic):
            permits = permitted(topic, Restriction(rows))
            if permits is not None and permits.has(key, request.payload):
                response.decided_by = permissions.place_of(action, request.topic, rows)
                response.explanation = f"{name} has {action.value} on {request.topic}, this record included"
                return
        response.allowed = False
        response.explanation = f"{name} has {action.value} on {request.topic}, but no rows have this record"

    async def ReloadAccess(
        self, request: access_pb2.ReloadAccessRequest, call: Call
    ) -> access_pb2.ReloadAccessResponse:
        identities, ended = await self._control.reload()
        call.notes.update(identities=identities, ended_calls=ended)
        return access_pb2.ReloadAccessResponse(identities=identities, ended_calls=ended)

    async def ListSessions(
        self, request: access_pb2.ListSessionsRequest, call: Call
    ) -> access_pb2.ListSessionsResponse:
        return access_pb2.ListSessionsResponse(
            sessions=[_message(session) for session in self._control.authorizer.sessions()]
        )

    async def EndSession(self, request: access_pb2.EndSessionRequest, call: Call) -> access_pb2.EndSessionResponse:
        for session in self._control.authorizer.sessions():
            if session.id == request.id:
                call.notes.update(session=session.id, ended_identity=session.identity)
                ended = StoreError(Reason.ACCESS_CHANGED, "an operator has ended this session")
                return access_pb2.EndSessionResponse(ended_calls=end_calls(session, ended))
        raise invalid("id", f"there is no session {request.id[:80]!r}")


def _message(session: Session) -> access_pb2.Session:
    calls = Counter(call.method.rpartition("/")[2] for call in session.calls)
    return access_pb2.Session(
        id=session.id,
        identity=session.identity,
        credential=session.credential,
        fingerprint=session.fingerprint,
        address=session.address,
        since_micros=session.since_micros,
        calls=[access_pb2.CallCount(method=method, count=count) for method, count in sorted(calls.items())],
    )
