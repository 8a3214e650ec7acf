"""Results of the calls about access: who the caller is, what an identity may do, who is connected (rules A1 to A8)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sow.v1 import access_pb2
from sow_client._records import datetime_of


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller, as the server knows it."""

    name: str
    """Empty: the server has no access file, and everybody may do everything."""
    credential: str
    """`certificate`, `token`, `jwt` or `none`."""
    fingerprint: str
    """The name of the credential in the audit log."""
    expires: datetime | None
    """None: never."""
    roles: tuple[str, ...]
    limits: Mapping[str, int]
    """The limits that apply, by name. Rule: A7."""


@dataclass(frozen=True, slots=True)
class AccessDecision:
    """The answer to the question whether an identity may do something."""

    allowed: bool
    decided_by: str
    """The line of the access file; empty: no grant matches."""
    explanation: str
    rows: str
    """The rows that are allowed, as a filter; empty: all."""
    hidden: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallerSession:
    """A caller with calls under way."""

    id: str
    """Where there are several cells, it has the name of its cell in front, as in "b/s17"."""
    identity: str
    credential: str
    fingerprint: str
    address: str
    since: datetime
    calls: Mapping[str, int]
    """How many, by the name of the method."""


def identity(response: access_pb2.WhoAmIResponse) -> Identity:
    expires = datetime_of(response.expire_time_micros) if response.HasField("expire_time_micros") else None
    return Identity(
        response.identity,
        response.credential,
        response.fingerprint,
        expires,
        tuple(response.roles),
        {limit.name: limit.value for limit in response.limits},
    )


def check_request(
    identity: str, action: str, topic: str, record: bytes | str | os.PathLike[str] | None, key: str
) -> access_pb2.CheckAccessRequest:
    request = access_pb2.CheckAccessRequest(identity=identity, action=action, topic=topic, key=key)
    if record is not None:
        if isinstance(record, os.PathLike):
            request.payload = Path(record).read_bytes()
        else:
            request.payload = record.encode() if isinstance(record, str) else record
    return request


def decision(response: access_pb2.CheckAccessResponse) -> AccessDecision:
    return AccessDecision(
        response.allowed, response.decided_by, response.explanation, response.rows, tuple(response.hidden)
    )


def session(message: access_pb2.Session) -> CallerSession:
    return CallerSession(
        message.id,
        message.identity,
        message.credential,
        message.fingerprint,
        message.address,
        datetime_of(message.since_micros),
        {call.method: call.count for call in message.calls},
    )
