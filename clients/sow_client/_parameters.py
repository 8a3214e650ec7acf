"""The values of a filter's parameters: Python values into the contract's. Pure: no I/O, no clock.

A value travels beside the filter with its type, and never inside its text: no user's text changes what a filter means.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeAlias

from sow.v1 import types_pb2
from sow_client._records import invalid

Parameters: TypeAlias = Mapping[str, object]
"""The value of each name: a text, a boolean, an integer, a float, None, or a list, tuple or set of these."""

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
INTEGER_LIMIT: Final = 10**4_300
"""The server takes integers of up to 4,300 digits, as Python does."""
_LISTS: Final = (list, tuple, set, frozenset)


def parameter_values(parameters: Parameters | None) -> dict[str, types_pb2.Parameter] | None:
    """The parameters of a request. Raises InvalidArgument, which names the one at fault."""
    if parameters is None:
        return None
    if not isinstance(parameters, Mapping):
        raise invalid("parameters", f"a dict of names and values is needed, not a {type(parameters).__name__}")
    made = {}
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise invalid("parameters", f"the name {name!r} is a {type(name).__name__}, not a text")
        made[_text("parameters", name)] = _message(f"parameters.{name}", value)
    return made


def parameters_of(text: str) -> Parameters:
    """The parameters in a JSON object, where they come as text: an option of Spark, a field of a page. Raises
    InvalidArgument."""
    try:
        made: object = json.loads(text, object_pairs_hook=_pairs, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise invalid("parameters", f'are no JSON object such as {{"name": "O\'Brien"}}: {error}') from None
    if not isinstance(made, dict):
        raise invalid("parameters", 'are no JSON object such as {"name": "O\'Brien"}')
    parameter_values(made)  # names a value that is none
    return made


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{name} is there twice")
        made[name] = value
    return made


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _message(field: str, value: object) -> types_pb2.Parameter:
    value = _plain(value)
    if isinstance(value, _LISTS):
        items = [_scalar(f"{field}[{index}]", _plain(item)) for index, item in enumerate(value)]
        return types_pb2.Parameter(list=types_pb2.ScalarList(items=items))
    return types_pb2.Parameter(scalar=_scalar(field, value))


def _plain(value: object) -> object:
    """The Python value of a scalar or an array of NumPy, pandas and their like; other values as they are."""
    kind: Any = getattr(getattr(value, "dtype", None), "kind", "")
    convert: Any = getattr(value, "tolist", None)
    return convert() if kind and kind in "biufUO" and callable(convert) else value


def _scalar(field: str, value: object) -> types_pb2.Scalar:
    match value:
        case None:
            return types_pb2.Scalar(null=True)
        case bool():
            return types_pb2.Scalar(boolean=value)
        case str():
            return types_pb2.Scalar(text=_text(field, value))
        case float():
            return types_pb2.Scalar(number=value)
        case _ if hasattr(value, "__index__"):
            return _integer(field, operator.index(value))
        case _ if isinstance(value, _LISTS):
            raise invalid(field, "is a list in a list")
        case _:
            raise invalid(
                field,
                f"a {type(value).__name__} is no value of a filter; give a text, a number, a boolean, None, or a list",
            )


def _integer(field: str, value: int) -> types_pb2.Scalar:
    if INT64_MIN <= value <= INT64_MAX:
        return types_pb2.Scalar(integer=value)
    if not -INTEGER_LIMIT < value < INTEGER_LIMIT:
        raise invalid(field, f"an integer of {value.bit_length()} bits has more than 4,300 digits, the limit")
    return types_pb2.Scalar(large_integer=str(value))


def _text(field: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(field, f"half a character, a surrogate, at {error.start}") from None
    return str.__str__(value)  # of a subclass, such as an enum of texts, too
