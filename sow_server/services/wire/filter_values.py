"""The values of a filter's parameters, from a request. All checks of a single value are here; each names it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Final

from sow.v1 import types_pb2
from sow_server.engine.values.fields import INTEGER_DIGITS_MAX, Scalar
from sow_server.filters.parameters import NO_VALUES, PARAMETERS_MAX, Values
from sow_server.filters.parser import LENGTH_BYTES_MAX
from sow_server.services.wire.convert import invalid

_INTEGER: Final = re.compile(rf"-?[0-9]{{1,{INTEGER_DIGITS_MAX}}}")


def filter_values(given: Mapping[str, types_pb2.Parameter]) -> Values:
    """The values by name. Raises StoreError INVALID_ARGUMENT."""
    if not given:
        return NO_VALUES
    if len(given) > PARAMETERS_MAX:
        raise invalid("parameters", f"has {len(given)}, more than the limit of {PARAMETERS_MAX}")
    room = _Room()
    return {name: _value(f"parameters.{name:.80}", given[name], room) for name in given}


async def values_read(readers: Executor, given: Mapping[str, types_pb2.Parameter]) -> Values:
    """As `filter_values`, in a reader thread: a list of 20,000 takes tens of milliseconds."""
    return await asyncio.get_running_loop().run_in_executor(readers, filter_values, given) if given else NO_VALUES


class _Room:
    """The bytes that all values may have together. A filter has no more (parameters [2]), so to look at more of them
    would be work for nothing."""

    def __init__(self) -> None:
        self._left = LENGTH_BYTES_MAX

    def take(self, field: str, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise invalid(field, f"with it the values are longer than {LENGTH_BYTES_MAX} bytes, the limit of a filter")


def _value(field: str, given: types_pb2.Parameter, room: _Room) -> Scalar | tuple[Scalar | None, ...] | None:
    match given.WhichOneof("value"):
        case "list":
            return tuple([_scalar(f"{field}[{index}]", item, room) for index, item in enumerate(given.list.items)])
        case "scalar":
            return _scalar(field, given.scalar, room)
        case _:
            raise invalid(field, "has no value")


def _scalar(field: str, given: types_pb2.Scalar, room: _Room) -> Scalar | None:
    kind = given.WhichOneof("value")
    room.take(field, len(given.text) + len(given.large_integer) + 3)
    match kind:
        case "null" if given.null:
            return None
        case "boolean":
            return given.boolean
        case "integer":
            return given.integer
        case "large_integer":
            if not _INTEGER.fullmatch(given.large_integer):
                raise invalid(field, f"large_integer is not an integer of at most {INTEGER_DIGITS_MAX} digits")
            return int(given.large_integer)
        case "number":
            return given.number
        case "text":
            return given.text
        case "null":
            raise invalid(field, "null is true or not given")
        case _:
            raise invalid(field, "has no value")
