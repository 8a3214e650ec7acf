"""Fields of requests that an older server would ignore, and with them a wish of the caller. Pure: no I/O, no clock.

[1]  A request with such a field goes only to a server whose contract has it: else "delete at this version" would be
     a delete. The client asks a server for its contract once for a connection, and only when it needs to know.
[2]  `FIELDS` has every field that the first release did not have, in a call that it had, and those that calls of a
     later contract were given after that. `HARMLESS` has those that
     may be ignored. A call that a server does not have at all is UNIMPLEMENTED.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf.message import Message

from sow.v1 import admin_pb2, snapshot_pb2, sow_pb2, types_pb2
from sow_client.errors import FailedPrecondition, SowError


class Needed(NamedTuple):
    """A field that a request needs, and the first contract that has it."""

    field: str
    contract: int


KNOWN_ELSEWHERE: Final = Needed("publisher.publisher_token", 2)
"""The contract by which instances report publishers to each other (rule F11). Where one does not, a retry is applied
again."""

REMOVALS: Final = Needed("remove", 3)
"""The contract that knows removals in a stream (rule P11). An older server would publish their documents."""

_EXTEND: Final = f"ttl_mode={types_pb2.TTL_MODE_EXTEND}"
_REPLICATED: Final = f"durability={types_pb2.DURABILITY_REPLICATED}"
_CAPS: Final = ("max_records", "max_stored_bytes")
_SETTINGS: Final = (
    "index",
    "max_age",
    "max_bytes",
    "max_entries",
    "backlog_ttl",
    "backlog_quota_bytes",
    "backlog_quota_age",
    "backlog_quota_entries",
    "backlog_action",
    "delivery_limit",
    "durable_idle_ttl",
    "idle_ttl",
    "publish_is_use",
    "only_if_empty",
    "auto_delete",
    "replicate_durables",
    "dead_letter",
    "dead_letter_by_key",
    "on_missing",
)
_PARAMETERS: Final = {"parameters": 3}
_PUBLISH: Final = (_EXTEND, _REPLICATED, "delta", "unset_paths")

FIELDS: Final[Mapping[type[Message], Mapping[str, int]]] = {
    sow_pb2.PublishRequest: {**dict.fromkeys(_PUBLISH, 2), "records.remove": 3},
    sow_pb2.PublishStreamRequest: {**dict.fromkeys(_PUBLISH, 2), "remove": 3},
    sow_pb2.GetRequest: dict.fromkeys(("touch", "touch_below_micros", "min_position"), 2),
    sow_pb2.QueryRequest: {
        **dict.fromkeys(("filter", "order_by", "explain", "min_position", "with_plan", "plan_only"), 2),
        **_PARAMETERS,
        **dict.fromkeys(("group_by", "aggregate", "having"), 3),  # it would send the records themselves
    },
    sow_pb2.SubscribeRequest: {
        **_PARAMETERS,
        **dict.fromkeys(
            ("order_by", "top_n", "skip_n", "group_by", "aggregate", "having"), 3
        ),  # it would send every record, and every change
        "tell_left": 3,  # the client would take the end for the break of a connection
    },
    sow_pb2.SowDeleteRequest: {
        **dict.fromkeys(("by_keys.versions", "by_filter", _REPLICATED, "publisher"), 2),
        **_PARAMETERS,
    },
    sow_pb2.TouchRequest: dict.fromkeys((_REPLICATED, "only", "atomic", "versions"), 2),
    admin_pb2.CreateTopicRequest: {
        **{f"settings.{name}": 2 for name in _SETTINGS},
        **{f"settings.{name}": 3 for name in _CAPS},
        "view": 3,  # it would make an ordinary topic
        "here": 3,  # it would be refused as one of another cell, or make it where there are no cells
    },
    admin_pb2.AlterTopicRequest: {
        **{f"settings.{name}": 2 for name in _SETTINGS},
        **{f"settings.{name}": 3 for name in _CAPS},
    },
    admin_pb2.DeleteTopicRequest: {"here": 3},  # it would delete a topic that it serves
    admin_pb2.ReloadPlacementRequest: dict.fromkeys(
        ("placement", "prepare", "drop_prepared"), 3
    ),  # it would read its file
    admin_pb2.SetPolicyRequest: {f"policy.topic.{name}": 3 for name in _CAPS},
    admin_pb2.RestampRequest: _PARAMETERS,
    admin_pb2.WatchFiguresRequest: {"history_micros": 3},  # it would begin with those of now
    snapshot_pb2.OpenExportRequest: {**_PARAMETERS, "others": 3},  # it would export the first topic alone
    snapshot_pb2.ReadChangesRequest: _PARAMETERS,
}
"""The fields of each request: the path of a field, perhaps with its value, and the first contract that has it."""
HARMLESS: Final[Mapping[str, str]] = {
    "publisher.publisher_token": "a publish is only repeated elsewhere if both instances know tokens (KNOWN_ELSEWHERE)",
    "publisher.unit": "OpenPublisher, which a unit begins with, is unknown to such a server",
    "publisher.unit_done": "as publisher.unit",
    "encoded_as": "such a server takes documents as bytes, as it always has",
    "detach": "of Acknowledge: such a server notices that a consumer has left by the end of its stream",
    "force": "of DeleteTopic: such a server has no peers that could lack anything",
}
"""Fields that a server may ignore, with the reason."""

_IsSet: TypeAlias = Callable[[Any], object]


def _test_of(request: type[Message], path: str) -> _IsSet:
    """The test whether a request has a field, perhaps with a value: something true if it has."""
    name, _, value = path.partition("=")
    parent, _, leaf = name.rpartition(".")
    if parent and (column := request.DESCRIPTOR.fields_by_name.get(parent)) and column.is_repeated:
        each, of_each = attrgetter(parent), attrgetter(leaf)
        return lambda message: any(map(of_each, each(message)))
    descriptor = request.DESCRIPTOR
    for step in parent.split(".") if parent else ():
        kind = descriptor.fields_by_name[step].message_type
        assert kind is not None, "only messages have fields"
        descriptor = kind
    of = attrgetter(name)
    if value:
        wanted = int(value)
        return lambda message: of(message) == wanted
    if not descriptor.fields_by_name[leaf].has_presence:
        return of
    if not parent:
        return lambda message: message.HasField(leaf)
    above = attrgetter(parent)
    return lambda message: above(message).HasField(leaf)


_TESTS: Final[Mapping[type[object], Sequence[tuple[_IsSet, Needed]]]] = {
    request: [
        (_test_of(request, path), Needed(path.partition("=")[0], contract))
        for path, contract in sorted(fields.items(), key=lambda field: -field[1])
    ]
    for request, fields in FIELDS.items()
}
"""The newest first. Each call runs them, so they cost little: half a microsecond together."""


def needed(request: object) -> Needed | None:
    """A field of a request that servers before some contract ignore, the newest of those; None: there is none."""
    for is_set, field in _TESTS.get(type(request), ()):
        if is_set(request):
            return field
    return None


def too_old(needs: Needed, server: str, contract: int) -> SowError:
    """The error of a request that an older server would misunderstand."""
    return FailedPrecondition(
        f"{needs.field}: {server} is an older server, of contract {contract}, and would ignore this: it needs contract "
        f"{needs.contract}",
        reason="SERVER_TOO_OLD",
        details={"field": needs.field, "server": server, "contract": str(contract), "needed": str(needs.contract)},
    )
