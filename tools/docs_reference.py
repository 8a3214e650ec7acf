"""Pages that are made from the code: the command, the contract, the Python API, the settings of the server. Pure.

[1]  The contract comes from `descriptors.binpb`, which carries the comments of the .proto files.
[2]  The Python API is what `sow_client.__all__` names; mkdocstrings reads the docstrings, without importing.
[3]  Defaults and bounds of settings are those of the code that reads the configuration.
[4]  The command's pages are its own help texts (`docs_command`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

import sow_client
from sow_server import config
from sow_server.config.sections import LISTENERS_TABLE, PEERS_TABLE
from tools import docs_command
from tools.docs_text import cell

DESCRIPTORS: Final = Path(__file__).resolve().parents[1] / "proto" / "sow" / "v1" / "descriptors.binpb"
PACKAGE: Final = ".sow.v1."
_Field: Final = FieldDescriptorProto
SCALARS: Final = {
    _Field.TYPE_BOOL: "bool",
    _Field.TYPE_BYTES: "bytes",
    _Field.TYPE_DOUBLE: "double",
    _Field.TYPE_FIXED32: "fixed32",
    _Field.TYPE_FIXED64: "fixed64",
    _Field.TYPE_FLOAT: "float",
    _Field.TYPE_INT32: "int32",
    _Field.TYPE_INT64: "int64",
    _Field.TYPE_SFIXED64: "sfixed64",
    _Field.TYPE_SINT32: "sint32",
    _Field.TYPE_SINT64: "sint64",
    _Field.TYPE_STRING: "string",
    _Field.TYPE_UINT32: "uint32",
    _Field.TYPE_UINT64: "uint64",
}
# Numbers of fields in descriptor.proto, which paths of comments consist of.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS = 2, 3, 4
_VALUES = _METHODS = 2
_SYNTAX = 12


def pages() -> dict[str, str]:
    """Every page, by its name below `docs/`."""
    return {**docs_command.command(), **contract(), **python(), "reference/settings.md": settings()}


# -- the contract -----------------------------------------------------------------------------------------------------


def contract() -> dict[str, str]:
    """A page for each file, see [1]."""
    files = FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())
    own = [file for file in files.file if file.package == "sow.v1"]
    places = {f"{PACKAGE}{name}": f"{_stem(file)}.md#{name.lower()}" for file in own for name in _names(file)}
    return {f"reference/rpc/{_stem(file)}.md": _file(file, places) for file in own}


def _stem(file: FileDescriptorProto) -> str:
    return Path(file.name).stem


def _names(file: FileDescriptorProto) -> Iterator[str]:
    yield from (one.name for one in file.enum_type)
    for message in file.message_type:
        yield message.name
        yield from (f"{message.name}.{one.name}" for one in message.nested_type)
        yield from (f"{message.name}.{one.name}" for one in message.enum_type)


class _Comments:
    """The comments of a file, by the paths of what they stand at."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._texts = {tuple(one.path): one for one in file.source_code_info.location}

    def at(self, *path: int) -> str:
        """As paragraphs."""
        found = self._texts.get(path)
        return "" if found is None else _text(found.leading_comments + found.trailing_comments)

    def of_file(self) -> str:
        """The comment above the file's first statement."""
        found = self._texts.get((_SYNTAX,))
        return "" if found is None else _text("\n".join([*found.leading_detached_comments, found.leading_comments]))


def _text(comment: str) -> str:
    return "\n".join(line.strip() for line in comment.strip().split("\n"))


def _file(file: FileDescriptorProto, places: Mapping[str, str]) -> str:
    comments = _Comments(file)
    title = file.service[0].name if file.service else "Shared types"
    parts = [f"# {title}\n", comments.of_file() + "\n", f"From `{file.name}`, package `sow.v1`.\n"]
    for number, service in enumerate(file.service):
        parts += _service(service, comments, number, places)
    for number, message in enumerate(file.message_type):
        parts += _message(message, message.name, comments, (_MESSAGES, number), places)
    for number, enum in enumerate(file.enum_type):
        parts += _enum(enum, enum.name, comments, (_ENUMS, number))
    return "\n".join(parts)


def _service(
    service: ServiceDescriptorProto, comments: _Comments, number: int, places: Mapping[str, str]
) -> Iterator[str]:
    yield comments.at(_SERVICES, number) + "\n"
    yield "| RPC | request | response | |\n|---|---|---|---|"
    for place, method in enumerate(service.method):
        request = ("stream of " if method.client_streaming else "") + _named(method.input_type, places)
        response = ("stream of " if method.server_streaming else "") + _named(method.output_type, places)
        told = cell(comments.at(_SERVICES, number, _METHODS, place))
        yield f"| `{method.name}` | {request} | {response} | {told} |"
    yield ""


def _message(
    message: DescriptorProto, name: str, comments: _Comments, path: Sequence[int], places: Mapping[str, str]
) -> Iterator[str]:
    if message.options.map_entry:
        return
    yield f"## {name} {{ #{name.lower()} }}\n"
    yield comments.at(*path) + "\n"
    if message.field:
        yield "| field | number | type | meaning |\n|---|---|---|---|"
        for place, field in enumerate(message.field):
            told = cell(comments.at(*path, _FIELDS, place))
            yield f"| `{field.name}` | {field.number} | {_type(field, message, places)} | {told} |"
        yield ""
    for place, nested in enumerate(message.nested_type):
        yield from _message(nested, f"{name}.{nested.name}", comments, (*path, _NESTED, place), places)
    for place, enum in enumerate(message.enum_type):
        yield from _enum(enum, f"{name}.{enum.name}", comments, (*path, _NESTED_ENUMS, place))


def _enum(enum: EnumDescriptorProto, name: str, comments: _Comments, path: Sequence[int]) -> Iterator[str]:
    yield f"## {name} {{ #{name.lower()} }}\n"
    yield comments.at(*path) + "\n"
    yield "| value | number | meaning |\n|---|---|---|"
    for place, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {cell(comments.at(*path, _VALUES, place))} |"
    yield ""


def _type(field: FieldDescriptorProto, within: DescriptorProto, places: Mapping[str, str]) -> str:
    entry = next((one for one in within.nested_type if field.type_name.endswith(f".{within.name}.{one.name}")), None)
    if entry is not None and entry.options.map_entry:
        return f"map of {_type(entry.field[0], entry, places)} to {_type(entry.field[1], entry, places)}"
    kind = SCALARS.get(field.type) or _named(field.type_name, places)
    if field.label == _Field.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind}, one of `{within.oneof_decl[field.oneof_index].name}`"
    return kind


def _named(full_name: str, places: Mapping[str, str]) -> str:
    name = full_name.removeprefix(PACKAGE).removeprefix(".")
    return f"[{name}]({places[full_name]})" if full_name in places else f"`{name}`"


# -- the Python API ---------------------------------------------------------------------------------------------------


def python() -> dict[str, str]:
    """The pages of the Python client [2]."""
    named = {name: getattr(sow_client, name) for name in sow_client.__all__}
    clients = {"Client", "AsyncClient"}
    errors = [name for name, one in named.items() if inspect.isclass(one) and issubclass(one, Exception)]
    values = [
        name
        for name, one in named.items()
        if inspect.isclass(one) and name not in clients and name not in errors and not name.startswith("Async")
    ]
    asynchronous = [name for name in named if name.startswith("Async") and name not in clients]
    return {
        "reference/python/client.md": _api(
            "Client", "The blocking client. [The Python clients](../../client.md) introduces it.", ["Client"]
        ),
        "reference/python/async.md": _api(
            "AsyncClient", "The same calls for asyncio, and what they return.", ["AsyncClient", *asynchronous]
        ),
        "reference/python/values.md": _api(
            "Values", "The values that calls of both clients take and return, in the order of the alphabet.", values
        ),
        "reference/python/errors.md": _api(
            "Exceptions", "All derive from `SowError`. [Errors](../../errors.md) has every reason.", errors
        ),
    }


def _api(title: str, about: str, names: Sequence[str]) -> str:
    return "\n".join([f"# {title}\n", f"{about}\n", *(f"::: sow_client.{name}\n" for name in names)])


# -- settings ---------------------------------------------------------------------------------------------------------


def settings() -> str:
    """Every key of the configuration file with its default and bounds, see [3]."""
    parts = [
        "# Every setting in one table\n",
        "Each key of the configuration file, as the code of this version has it: the default, and the values that are",
        "accepted. [Configuration](../configuration.md) explains them. A variable of the environment sets the same.\n",
    ]
    variables = {(knob.table, knob.key): f"`{name}`" for name, knob in config.variables().items()}
    table = ""
    for knob in config.knobs():
        if knob.table != table:
            table = knob.table
            name = f"[[{table}]]" if table in (LISTENERS_TABLE, PEERS_TABLE) else f"[{table}]"
            parts.append(
                f"\n## {name} {{ #{_anchor(table)} }}\n\n| key | default | bounds | variable |\n|---|---|---|---|"
            )
        default = cell(f"`{knob.default}`") if knob.default else "–"
        bounds = knob.bounds.replace('"', "") or "–"
        parts.append(f"| `{knob.key}` | {default} | {bounds} | {variables.get((knob.table, knob.key), '–')} |")
    return "\n".join(parts)


def _anchor(table: str) -> str:
    return "table-" + "".join(one if one.isalnum() else "-" for one in table.lower())
