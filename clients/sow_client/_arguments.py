"""Errors that name the argument: a value that no field of a message holds is refused as InvalidArgument. Pure.

[1]  Only a call that has failed is looked at, so a correct call pays for one more function call.
[2]  The error is another one only if an argument is at fault for sure: half a surrogate in a text, a number beyond 64
     bits, or a value of another type than the signature has. Every other exception passes as it is.
"""

from __future__ import annotations

import inspect
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from functools import wraps
from math import isfinite
from typing import Any, Final, Literal, TypeVar, Union

from sow_client._records import invalid
from sow_client.errors import InvalidArgument, SowError

_Class = TypeVar("_Class", bound=type)

_DEPTH_MAX: Final = 4
_UINT64_MAX: Final = 2**64 - 1
_INT32_MAX: Final = 2**31 - 1
_PLAIN: Final = (str, bool, int, float, bytes)


def refused_by_name(cls: _Class) -> _Class:
    """Makes the public methods of a class, also those that it inherits, refuse such arguments by their names."""
    for name in dir(cls):
        if name.startswith("_") and name != "__init__":
            continue
        function = inspect.getattr_static(cls, name)
        if inspect.isfunction(function) and name != "close":
            setattr(cls, name, _naming(function))
    return cls


_FAULTS: Final = (ValueError, TypeError, ArithmeticError, AttributeError)
"""The exceptions that a value of another type or range leads to."""


def _naming(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(function):

        @wraps(function)
        async def naming_lazily(*args: Any, **named: Any) -> Any:
            async with aclosing(function(*args, **named)) as answers:
                try:
                    async for answer in answers:
                        yield answer
                except _FAULTS as error:
                    if (found := _refusal(function, args, named, error)) is None:
                        raise
                    raise found from error

        return naming_lazily
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def naming_in_turn(*args: Any, **named: Any) -> Any:
            try:
                return (yield from function(*args, **named))
            except _FAULTS as error:
                if (found := _refusal(function, args, named, error)) is None:
                    raise
                raise found from error

        return naming_in_turn
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def naming_later(*args: Any, **named: Any) -> Any:
            try:
                return await function(*args, **named)
            except _FAULTS as error:
                if (found := _refusal(function, args, named, error)) is None:
                    raise
                raise found from error

        return naming_later

    @wraps(function)
    def naming(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except _FAULTS as error:
            if (found := _refusal(function, args, named, error)) is None:
                raise
            raise found from error

    return naming


def _refusal(
    function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any], error: Exception
) -> InvalidArgument | None:
    """The refusal of the argument at fault; None: none is."""
    if isinstance(error, SowError):
        return None
    try:
        bound = inspect.signature(function).bind(*args, **named)
    except TypeError:
        return None  # Python itself names the argument that is missing or unknown
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        arguments.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    if isinstance(error, UnicodeError):
        for name, value in arguments.items():
            for text in _parts(value, str):
                if (at := surrogate_at(text)) is not None:
                    return invalid(name, f"{reprlib.repr(text)} has half a surrogate pair at character {at + 1}")
    hints = _hints(function)
    for name, value in arguments.items():
        if name in hints and not _fits(value, hints[name]):
            return invalid(name, f"{reprlib.repr(value)} is of type {type(value).__name__}, which it does not take")
    if isinstance(error, ValueError | OverflowError):
        return _out_of_range(arguments)
    return None


def surrogate_at(text: str) -> int | None:
    """The place of the first half of a surrogate pair in a text, which has no form in UTF-8; None: there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _out_of_range(arguments: Mapping[str, Any]) -> InvalidArgument | None:
    """The refusal of a number that no field holds: the one that is farthest out, as fields differ in size and sign."""
    worst: tuple[int, str, object] | None = None
    for name, value in arguments.items():
        for number in _parts(value, (int, float)):
            if isinstance(number, float):
                out = 0 if isfinite(number) else 4
            elif -(2**63) <= number <= _UINT64_MAX:
                out = 2 if number < 0 else 1 if number > _INT32_MAX else 0
            else:
                out = 3
            if out and (worst is None or out > worst[0]):
                worst = out, name, number
    if worst is None:
        return None
    return invalid(worst[1], f"{reprlib.repr(worst[2])} is out of its range")


def _parts(value: object, kinds: type | tuple[type, ...], depth: int = 0) -> Iterator[Any]:
    """The values of some kinds in an argument: itself, or in lists and the like."""
    if isinstance(value, bool):
        return
    if isinstance(value, kinds):
        yield value
    elif depth < _DEPTH_MAX:
        if isinstance(value, Mapping):
            value = [*value.keys(), *value.values()]
        if isinstance(value, list | tuple | set | frozenset):
            for one in value:
                yield from _parts(one, kinds, depth + 1)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of the arguments, as far as they exist at run time: some are there for type checkers alone."""
    hints: dict[str, Any] = {}
    for name, text in function.__annotations__.items():
        with suppress(NameError, TypeError, AttributeError):
            hints.update(typing.get_type_hints(_Annotated(function, name, text)))
    for hint in [hint for hint in hints.values() if typing.get_origin(hint) is typing.Unpack]:
        hints.update(typing.get_type_hints(typing.get_args(hint)[0]))
    return hints


class _Annotated:
    """A function with one of its annotations, for `get_type_hints`."""

    def __init__(self, function: Callable[..., Any], name: str, text: Any) -> None:
        self.__annotations__ = {name: text}
        self.__globals__ = inspect.unwrap(function).__globals__


def _fits(value: object, hint: Any) -> bool:
    """True if a value has the type of a signature, or if that cannot be decided here."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is None or hint is types.NoneType:
        return value is None
    if hint is float:
        return isinstance(value, float | int)
    if hint is bool:
        return isinstance(value, bool | int)  # any truth value is taken
    if hint in _PLAIN:
        return isinstance(value, hint)
    if typing.is_typeddict(hint):
        return isinstance(value, Mapping)
    if origin is tuple:
        return isinstance(value, tuple)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        of, *more = typing.get_args(hint)
        if (isinstance(value, str) and of not in (str, Any)) or (isinstance(value, bytes) and of not in (int, Any)):
            return False  # a text has texts, and bytes have numbers
        one_by_one = not more and isinstance(value, list | tuple | set | frozenset)
        return isinstance(value, origin) and (not one_by_one or all(_fits(one, of) for one in value))
    if isinstance(kind := origin or hint, type) and not getattr(kind, "_is_protocol", False):
        return isinstance(value, kind)
    return True
