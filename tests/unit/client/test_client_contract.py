"""Requests that an older server would misunderstand: which they are, by the descriptors of the last release, and what
becomes of them (_contract [1], [2]). And that the client reads all of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

import sow_client
from sow.contract import CONTRACT, UNDESCRIBED
from sow.v1 import access_pb2, admin_pb2, load_pb2, snapshot_pb2, sow_pb2, types_pb2
from sow_client import FailedPrecondition
from sow_client._contract import FIELDS, HARMLESS, KNOWN_ELSEWHERE, Needed, needed, too_old
from tests.support.oracles.old_contract import methods as old_methods

FILES = (sow_pb2, admin_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def missing(old: Descriptor, new: Descriptor, path: str = "") -> Iterator[str]:
    """The paths of fields, and of values of enums, that a message had not in the release."""
    for field in new.fields:
        before = old.fields_by_name.get(field.name)
        if before is None:
            yield path + field.name
        elif field.message_type is not None:
            assert before.message_type is not None
            yield from missing(before.message_type, field.message_type, f"{path}{field.name}.")
        elif field.enum_type is not None:
            assert before.enum_type is not None
            known = before.enum_type.values_by_number
            yield from (
                f"{path}{field.name}={value.number}" for value in field.enum_type.values if value.number not in known
            )


def test_every_field_that_the_release_would_ignore_is_in_the_table_or_harmless() -> None:
    """Whoever adds a field to a request of a released call decides here what an older server makes of it."""
    found: dict[str, set[str]] = {}
    for path, old in old_methods().items():
        request = METHODS[path].input_type
        if fields := set(missing(old.input_type, request)) - set(HARMLESS):
            found[request.name] = fields
    released = {METHODS[path].input_type.name for path in old_methods()}
    told = {
        request.DESCRIPTOR.name: set(fields)
        for request, fields in FIELDS.items()
        if request.DESCRIPTOR.name in released
    }
    undecided = {name: fields - told.get(name, set()) for name, fields in found.items() if fields != told.get(name)}
    assert undecided == {}, "each belongs into FIELDS or HARMLESS of clients/sow_client/_contract.py"
    assert found == told


def of_answers(message: Descriptor, seen: set[str]) -> Iterator[str]:
    """The fields of an answer and of the messages in it, each as "Message.field"."""
    if message.full_name in seen or not message.full_name.startswith("sow.v1."):
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield f"{message.name}.{field.name}"
        if field.message_type is not None:
            yield from of_answers(field.message_type, seen)


def test_the_client_reads_every_field_of_every_answer() -> None:
    """By their names alone: a name that is somewhere in the client counts."""
    seen: set[str] = set()
    fields = {
        name
        for file in (*FILES, access_pb2, load_pb2, snapshot_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        for name in of_answers(method.output_type, seen)
    }
    code = "".join(path.read_text() for path in Path(sow_client.__file__).parent.rglob("*.py"))
    read = set(re.findall(r"\w+", code))
    unread = {name for name in fields if name.split(".")[1] not in read}
    unread -= {"GetPublisherResponse.highest_sequence"}  # publishers begin with OpenPublisher
    unread -= {"GetPlacementResponse.strays_of_asking_cell"}  # servers of other cells ask for it (rule C7)
    unread -= {"SubscribeResponse.topics_left"}  # for clients whose gRPC drops messages before an error (rule C21)
    assert unread == set(), "a class of clients/sow_client has each of them, or the reason stands here"


def test_every_request_with_a_filter_and_parameters_needs_a_server_that_knows_them() -> None:
    """Also calls that the first release did not have: a server of contract 2 has them without parameters."""
    requests = {
        name
        for file in (sow_pb2, admin_pb2, snapshot_pb2)
        for name, message in file.DESCRIPTOR.message_types_by_name.items()
        if name.endswith("Request") and "parameters" in message.fields_by_name
    }
    assert len(requests) == 6
    assert requests == {request.DESCRIPTOR.name for request, fields in FIELDS.items() if fields.get("parameters") == 3}


def test_no_field_needs_a_contract_that_is_still_to_come() -> None:
    asked = [contract for fields in FIELDS.values() for contract in fields.values()] + [KNOWN_ELSEWHERE.contract]
    assert min(asked) > UNDESCRIBED
    assert max(asked) <= CONTRACT


LIFETIME = types_pb2.Lifetime(ttl_micros=1)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (sow_pb2.GetRequest(topic="t", keys=["1"]), ""),
        (sow_pb2.GetRequest(topic="t", keys=["1"], min_position="e.1"), "min_position"),
        (sow_pb2.GetRequest(topic="t", keys=["1"], touch=LIFETIME), "touch"),
        (sow_pb2.QueryRequest(topic="t"), ""),
        (sow_pb2.QueryRequest(topic="t", filter="/a = 1"), "filter"),
        (sow_pb2.QueryRequest(topic="t", plan_only=True), "plan_only"),
        (sow_pb2.TouchRequest(topic="t", keys=["1"], lifetime=LIFETIME), ""),
        (sow_pb2.TouchRequest(topic="t", keys=["1"], versions=[7]), "versions"),
        (sow_pb2.TouchRequest(topic="t", only=sow_pb2.TOUCH_ONLY_LATER), "only"),
        (sow_pb2.SowDeleteRequest(topic="t", by_keys=sow_pb2.KeyList(keys=["1"])), ""),
        (sow_pb2.SowDeleteRequest(topic="t", by_keys=sow_pb2.KeyList(keys=["1"], versions=[7])), "by_keys.versions"),
        (sow_pb2.PublishRequest(topic="t", publisher=types_pb2.PublisherPosition(publisher_token=7)), ""),
        (sow_pb2.PublishRequest(topic="t", durability=types_pb2.DURABILITY_FSYNC), ""),
        (sow_pb2.PublishRequest(topic="t", durability=types_pb2.DURABILITY_REPLICATED), "durability"),
        (sow_pb2.PublishStreamRequest(topic="t", delta=True), "delta"),
        (admin_pb2.CreateTopicRequest(name="t", settings=admin_pb2.TopicSettings(key=["/id"])), ""),
        (admin_pb2.CreateTopicRequest(settings=admin_pb2.TopicSettings(index=["/a"])), "settings.index"),
        (admin_pb2.AlterTopicRequest(settings=admin_pb2.TopicSettings(max_entries=1)), "settings.max_entries"),
        (admin_pb2.AlterTopicRequest(settings=admin_pb2.TopicSettings(max_records=1)), "settings.max_records"),
        (
            admin_pb2.SetPolicyRequest(policy=admin_pb2.Policy(topic=admin_pb2.TopicSettings(max_records=1))),
            "policy.topic.max_records",
        ),
        (admin_pb2.SetPolicyRequest(policy=admin_pb2.Policy(topic=admin_pb2.TopicSettings(max_entries=1))), ""),
        (admin_pb2.GetStatusRequest(), ""),
        (admin_pb2.WatchFiguresRequest(interval_micros=1), ""),
        (admin_pb2.WatchFiguresRequest(history_micros=1), "history_micros"),
        (snapshot_pb2.OpenExportRequest(topic="t", lease_micros=1), ""),
        (snapshot_pb2.OpenExportRequest(others=[snapshot_pb2.ExportedTopic(topic="u")]), "others"),
    ],
    ids=str,
)
def test_a_request_needs_what_is_in_it(request_: Message, field: str) -> None:
    found = needed(request_)
    assert ("" if found is None else found.field) == field


def test_the_error_names_the_field_the_server_and_both_contracts() -> None:
    error = too_old(Needed("min_position", 2), "a:7450", 1)
    assert (type(error), error.reason) == (FailedPrecondition, "SERVER_TOO_OLD")
    assert error.details == {"field": "min_position", "server": "a:7450", "contract": "1", "needed": "2"}
    assert "min_position: a:7450 is an older server" in error.message
