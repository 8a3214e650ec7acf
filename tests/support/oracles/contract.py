"""The contract as data: the changes between two versions, and its undocumented parts. Pure functions.

A change is breaking if a program built against the older version would notice it: on the wire, in JSON, or in generated
code. So names count as much as numbers, and nothing is ever removed; a name that is out of use stays and says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)


def breaking_changes(old: FileDescriptorSet, new: FileDescriptorSet, *, package: str) -> list[str]:
    """The parts of the old contract that the new one breaks, one sentence each; empty when compatible."""
    old_traits, new_traits = _traits(old, package), _traits(new, package)
    changes = []
    for name, traits in old_traits.items():
        if name not in new_traits:
            changes.append(f"{name} is gone")
            continue
        for trait, value in traits.items():
            now = new_traits[name][trait]
            if now != value:
                changes.append(f"{name}: {trait} was {value}, is {now}")
    return changes


def undocumented(contract: FileDescriptorSet, *, package: str) -> list[str]:
    """Full names of the messages, fields, enums, values, services and methods without a comment above them."""
    missing = []
    for file in contract.file:
        if file.package != package:
            continue
        commented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
        missing += [name for name, path in _places(file) if path not in commented]
    return missing


def _traits(contract: FileDescriptorSet, package: str) -> dict[str, dict[str, object]]:
    """Full name of each element -> its parts that must not change."""
    traits: dict[str, dict[str, object]] = {}
    for file in contract.file:
        if file.package != package:
            continue
        for message in file.message_type:
            _message_traits(f"{package}.{message.name}", message, file.name, traits)
        for enum in file.enum_type:
            _enum_traits(f"{package}.{enum.name}", enum, file.name, traits)
        for service in file.service:
            traits[f"{package}.{service.name}"] = {"kind": "service", "file": file.name}
            for method in service.method:
                traits[f"{package}.{service.name}.{method.name}"] = {
                    "kind": "method",
                    "request": method.input_type,
                    "response": method.output_type,
                    "client streaming": method.client_streaming,
                    "server streaming": method.server_streaming,
                }
    return traits


def _message_traits(name: str, message: DescriptorProto, file: str, traits: dict[str, dict[str, object]]) -> None:
    traits[name] = {"kind": "message", "file": file}  # the file is part of the import path in Python
    for field in message.field:
        traits[f"{name}.{field.name}"] = {
            "kind": "field",
            "number": field.number,
            "type": FieldDescriptorProto.Type.Name(field.type),
            "type name": field.type_name,
            "label": FieldDescriptorProto.Label.Name(field.label),
            "presence": field.proto3_optional,
            # Its name, not its index: another oneof before it changes nothing.
            "oneof": message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "",
            "name in JSON": field.json_name or _json_name(field.name),
            "packed": field.options.packed if field.options.HasField("packed") else None,
        }
    for nested in message.nested_type:
        _message_traits(f"{name}.{nested.name}", nested, file, traits)
    for enum in message.enum_type:
        _enum_traits(f"{name}.{enum.name}", enum, file, traits)


def _json_name(name: str) -> str:
    # protoc fills in the default; the descriptors inside generated code leave it out.
    return re.sub("_+(.?)", lambda match: match[1].upper(), name)


def _enum_traits(name: str, enum: EnumDescriptorProto, file: str, traits: dict[str, dict[str, object]]) -> None:
    traits[name] = {"kind": "enum", "file": file}
    for value in enum.value:
        traits[f"{name}.{value.name}"] = {"kind": "enum value", "number": value.number}


# Numbers of the fields of FileDescriptorProto and its parts, of which the paths in source_code_info are made.
_FILE = {name: field.number for name, field in FileDescriptorProto.DESCRIPTOR.fields_by_name.items()}
_MESSAGE = {name: field.number for name, field in DescriptorProto.DESCRIPTOR.fields_by_name.items()}
_ENUM_VALUE = EnumDescriptorProto.VALUE_FIELD_NUMBER
_SERVICE_METHOD = 2


def _places(file: FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    numbers = (_FILE["message_type"], _FILE["enum_type"])
    yield from _messages_and_enums(file.package, file.message_type, file.enum_type, (), numbers)
    for index, service in enumerate(file.service):
        path = (_FILE["service"], index)
        yield f"{file.package}.{service.name}", path
        for number, method in enumerate(service.method):
            yield f"{file.package}.{service.name}.{method.name}", (*path, _SERVICE_METHOD, number)


def _messages_and_enums(
    scope: str,
    messages: Sequence[DescriptorProto],
    enums: Sequence[EnumDescriptorProto],
    prefix: tuple[int, ...],
    numbers: tuple[int, int],
) -> Iterator[tuple[str, tuple[int, ...]]]:
    message_number, enum_number = numbers
    for index, message in enumerate(messages):
        if message.options.map_entry:  # protobuf's own message for a map, which has the comment
            continue
        name, path = f"{scope}.{message.name}", (*prefix, message_number, index)
        yield name, path
        for number, field in enumerate(message.field):
            yield f"{name}.{field.name}", (*path, _MESSAGE["field"], number)
        nested_numbers = (_MESSAGE["nested_type"], _MESSAGE["enum_type"])
        yield from _messages_and_enums(name, message.nested_type, message.enum_type, path, nested_numbers)
    for index, enum in enumerate(enums):
        name, path = f"{scope}.{enum.name}", (*prefix, enum_number, index)
        yield name, path
        for number, value in enumerate(enum.value):
            yield f"{name}.{value.name}", (*path, _ENUM_VALUE, number)
