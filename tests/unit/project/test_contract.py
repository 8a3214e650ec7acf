"""The contract stays compatible, and documents every part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

from generate import RELEASE_DESCRIPTORS, descriptors
from sow.v1 import admin_pb2, sow_pb2, types_pb2
from tests.support.oracles.contract import breaking_changes, undocumented

PACKAGE = "sow.v1"


@pytest.fixture(scope="module")
def release() -> FileDescriptorSet:
    return FileDescriptorSet.FromString(RELEASE_DESCRIPTORS.read_bytes())


def test_the_contract_is_compatible_with_the_last_release(release: FileDescriptorSet) -> None:
    assert breaking_changes(release, descriptors(), package=PACKAGE) == []


def test_every_part_of_the_contract_has_a_comment() -> None:
    assert undocumented(descriptors(with_comments=True), package=PACKAGE) == []


def test_the_release_is_complete_and_carries_no_comments(release: FileDescriptorSet) -> None:
    names = {file.name for file in release.file}
    assert names >= {"sow/v1/types.proto", "sow/v1/sow.proto", "sow/v1/admin.proto", "google/protobuf/duration.proto"}
    assert not any(file.HasField("source_code_info") for file in release.file)


def test_the_stubs_are_of_this_contract() -> None:
    by_name = {file.name: file for file in descriptors().file}
    for stub in (types_pb2, sow_pb2, admin_pb2):
        compiled = FileDescriptorSet(file=[by_name[stub.DESCRIPTOR.name]])
        loaded = FileDescriptorSet()
        stub.DESCRIPTOR.CopyToProto(loaded.file.add())
        assert breaking_changes(compiled, loaded, package=PACKAGE) == []
        assert breaking_changes(loaded, compiled, package=PACKAGE) == []


# Changes that must be noticed. Each mutates a copy of the contract.


def _message(contract: FileDescriptorSet, name: str) -> DescriptorProto:
    return next(message for file in contract.file for message in file.message_type if message.name == name)


def _field(contract: FileDescriptorSet, message: str, name: str) -> FieldDescriptorProto:
    return next(field for field in _message(contract, message).field if field.name == name)


def _service(contract: FileDescriptorSet) -> ServiceDescriptorProto:
    return next(service for file in contract.file for service in file.service if service.name == "SowService")


def _method(contract: FileDescriptorSet, name: str) -> MethodDescriptorProto:
    return next(method for method in _service(contract).method if method.name == name)


def _remove_message(contract: FileDescriptorSet) -> None:
    for file in contract.file:
        for message in [message for message in file.message_type if message.name == "KeyList"]:
            file.message_type.remove(message)


def _remove_field(contract: FileDescriptorSet) -> None:
    _message(contract, "Record").field.remove(_field(contract, "Record", "origin"))


def _rename_field(contract: FileDescriptorSet) -> None:
    _field(contract, "Record", "origin").name = "source"


def _renumber_field(contract: FileDescriptorSet) -> None:
    _field(contract, "Record", "origin").number = 77


def _retype_field(contract: FileDescriptorSet) -> None:
    _field(contract, "Record", "version").type = FieldDescriptorProto.TYPE_SFIXED64


def _retype_message_field(contract: FileDescriptorSet) -> None:
    _field(contract, "PublishRequest", "lifetime").type_name = ".sow.v1.Condition"


def _repeat_field(contract: FileDescriptorSet) -> None:
    _field(contract, "Record", "key").label = FieldDescriptorProto.LABEL_REPEATED


def _drop_presence(contract: FileDescriptorSet) -> None:
    _field(contract, "Record", "expire_time_micros").ClearField("proto3_optional")


def _leave_oneof(contract: FileDescriptorSet) -> None:
    _field(contract, "Lifetime", "never").ClearField("oneof_index")


def _remove_enum(contract: FileDescriptorSet) -> None:
    for file in contract.file:
        for enum in [enum for enum in file.enum_type if enum.name == "TtlMode"]:
            file.enum_type.remove(enum)


def _remove_enum_value(contract: FileDescriptorSet) -> None:
    for file in contract.file:
        for enum in file.enum_type:
            for value in [value for value in enum.value if value.name == "TTL_MODE_KEEP"]:
                enum.value.remove(value)


def _renumber_enum_value(contract: FileDescriptorSet) -> None:
    for file in contract.file:
        for enum in file.enum_type:
            for value in enum.value:
                if value.name == "DURABILITY_BUFFERED":
                    value.number = 9


def _remove_service(contract: FileDescriptorSet) -> None:
    for file in contract.file:
        if any(service.name == "SowService" for service in file.service):
            file.ClearField("service")


def _remove_method(contract: FileDescriptorSet) -> None:
    _service(contract).method.remove(_method(contract, "Touch"))


def _change_request(contract: FileDescriptorSet) -> None:
    _method(contract, "Touch").input_type = ".sow.v1.GetRequest"


def _change_response(contract: FileDescriptorSet) -> None:
    _method(contract, "Touch").output_type = ".sow.v1.GetResponse"


def _stop_client_streaming(contract: FileDescriptorSet) -> None:
    _method(contract, "PublishStream").client_streaming = False


def _start_server_streaming(contract: FileDescriptorSet) -> None:
    _method(contract, "Get").server_streaming = True


def _move_to_other_file(contract: FileDescriptorSet) -> None:
    by_name = {file.name: file for file in contract.file}
    record = _message(contract, "Record")
    by_name["sow/v1/admin.proto"].message_type.append(record)
    by_name["sow/v1/types.proto"].message_type.remove(record)


@pytest.mark.parametrize(
    ("mutate", "noticed"),
    [
        (_remove_message, "sow.v1.KeyList is gone"),
        (_remove_field, "sow.v1.Record.origin is gone"),
        (_rename_field, "sow.v1.Record.origin is gone"),
        (_renumber_field, "sow.v1.Record.origin: number was 7, is 77"),
        (_retype_field, "sow.v1.Record.version: type was TYPE_INT64, is TYPE_SFIXED64"),
        (_retype_message_field, "sow.v1.PublishRequest.lifetime: type name was .sow.v1.Lifetime, is .sow.v1.Condition"),
        (_repeat_field, "sow.v1.Record.key: label was LABEL_OPTIONAL, is LABEL_REPEATED"),
        (_drop_presence, "sow.v1.Record.expire_time_micros: presence was True, is False"),
        (_leave_oneof, "sow.v1.Lifetime.never: oneof was lifetime, is "),
        (_remove_enum, "sow.v1.TtlMode is gone"),
        (_remove_enum_value, "sow.v1.TtlMode.TTL_MODE_KEEP is gone"),
        (_renumber_enum_value, "sow.v1.Durability.DURABILITY_BUFFERED: number was 2, is 9"),
        (_remove_service, "sow.v1.SowService is gone"),
        (_remove_method, "sow.v1.SowService.Touch is gone"),
        (_change_request, "sow.v1.SowService.Touch: request was .sow.v1.TouchRequest, is .sow.v1.GetRequest"),
        (_change_response, "sow.v1.SowService.Touch: response was .sow.v1.TouchResponse, is .sow.v1.GetResponse"),
        (_stop_client_streaming, "sow.v1.SowService.PublishStream: client streaming was True, is False"),
        (_start_server_streaming, "sow.v1.SowService.Get: server streaming was False, is True"),
        (_move_to_other_file, "sow.v1.Record: file was sow/v1/types.proto, is sow/v1/admin.proto"),
    ],
)
def test_a_breaking_change_is_noticed(
    release: FileDescriptorSet, mutate: Callable[[FileDescriptorSet], None], noticed: str
) -> None:
    mutated = FileDescriptorSet()
    mutated.CopyFrom(release)
    mutate(mutated)
    assert noticed in breaking_changes(release, mutated, package=PACKAGE)


def test_an_addition_is_no_breaking_change(release: FileDescriptorSet) -> None:
    grown = FileDescriptorSet()
    grown.CopyFrom(release)
    _message(grown, "Record").field.add(
        name="added",
        number=99,
        type=FieldDescriptorProto.TYPE_BYTES,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )
    _service(grown).method.add(name="Added", input_type=".sow.v1.GetRequest", output_type=".sow.v1.GetResponse")
    assert breaking_changes(release, grown, package=PACKAGE) == []
    assert breaking_changes(grown, release, package=PACKAGE) != []


def test_a_missing_comment_is_noticed() -> None:
    contract = descriptors(with_comments=True)
    for file in contract.file:
        for place in file.source_code_info.location:
            place.ClearField("leading_comments")
    missing = undocumented(contract, package=PACKAGE)
    assert {
        "sow.v1.Record",
        "sow.v1.Record.key",
        "sow.v1.Lifetime.never",
        "sow.v1.TtlMode",
        "sow.v1.TtlMode.TTL_MODE_KEEP",
        "sow.v1.SowService",
        "sow.v1.SowService.Touch",
    } <= set(missing)
