"""`--param`: the values of a filter's parameters on the command line.

[1]  `name=TEXT` is always a text, also where it looks like a number or like JSON: it may come from a variable of the
     shell, and no user's text may choose its own type. `name:=JSON` has every other type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TypeAlias

import click

from sow_cli.output import note

Values: TypeAlias = dict[str, object]

_GIVEN: Final = re.compile(r"([^\W\d]\w*)(:?=)(.*)", re.DOTALL)
_NO_TEXTS: Final = ("true", "false", "null")


def param_option(command: Callable[..., object]) -> Callable[..., object]:
    """The option of every command that takes a filter; its value is the client's `parameters`."""
    return click.option(
        "--param",
        "parameters",
        multiple=True,
        metavar="NAME=TEXT|NAME:=JSON",
        callback=_values,
        help="The value of :NAME in the filter (repeatable): a text, whatever is in it, or with := JSON such as 5, "
        "true or [1, 2].",
    )(command)


def _values(_ctx: click.Context, _option: click.Parameter, given: Sequence[str]) -> Values | None:
    made: Values = {}
    for text in given:
        name, value = parameter(text)
        if name in made:
            raise click.BadParameter(f"the parameter {name} is given twice")
        made[name] = value
        if value in _NO_TEXTS and text == f"{name}={value}":
            note(f"the parameter {name} is the text {value!r}; {value} itself is --param {name}:={value}")
    return made or None


def parameter(text: str) -> tuple[str, object]:
    """The name and the value of one `--param` [1]. Raises click.BadParameter."""
    found = _GIVEN.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not NAME=TEXT or NAME:=JSON, and a name is letters, digits and _")
    name, sign, value = found.groups()
    if sign == "=":
        return name, value
    try:
        made: object = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(
            f'the value of {name} is not JSON ({error}); a text is {name}=TEXT, a list of texts {name}:=["a", "b"]'
        ) from None
    if isinstance(made, dict):
        raise click.BadParameter(
            f"the value of {name} is an object; give a text, a number, true, false, null or a list"
        )
    return name, made


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
