"""The values of a filter's parameters, `:name`: they stand in its tree, and never in a text that is parsed. Pure.

[1]  A value becomes a literal of its own type, whatever characters a text has. So no value can change the form of
     a filter.
[2]  Each use of a parameter counts towards the length of the filter, with the length that its literal has as text.
     So a short filter that uses a long parameter often cannot become a long one.
[3]  A filter uses all its parameters: one that is given and not used is more likely a mistyped name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from sow_server.engine.values.fields import Scalar
from sow_server.filters.filter_errors import FilterError
from sow_server.filters.printer import print_filter
from sow_server.filters.tree import Boolean, Literal, Null, Number, literal

Values: TypeAlias = Mapping[str, Scalar | tuple[Scalar | None, ...] | None]
"""The values of parameters by name; a tuple is a list."""

NO_VALUES: Final[Values] = {}
PARAMETERS_MAX: Final = 1_000
"""Parameters of one filter."""
_NAME: Final = re.compile(r"[^\W\d]\w{0,63}")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter and its value. Two are equal if no filter can tell them apart: not so 1 and true, which Python takes
    for equal."""

    name: str
    is_list: bool
    texts: tuple[str, ...]
    """The canonical text of each literal."""
    literals: tuple[Literal, ...] = field(compare=False)

    @property
    def length_bytes(self) -> int:
        """The length of its text [2]."""
        return sum([len(text.encode()) + 2 for text in self.texts])

    @property
    def kind(self) -> str:
        """Its type, in words."""
        match self.literals:
            case _ if self.is_list:
                return "a list"
            case (Null(),):
                return "null"
            case (Boolean(),):
                return "a boolean"
            case (Number(),):
                return "a number"
            case _:
                return "a text"


Parameters: TypeAlias = tuple[Parameter, ...]
"""Those of one filter, by name. It may be the key of a cache."""


def parameters(values: Values) -> Parameters:
    """The parameters of a request. Raises FilterError, which names the one at fault."""
    if len(values) > PARAMETERS_MAX:
        raise FilterError(f"{len(values)} parameters, more than the limit of {PARAMETERS_MAX}")
    made = []
    for name in sorted(values):
        if not _NAME.fullmatch(name):
            raise FilterError(
                f"parameter {name!r:.80}: a name is a letter or _, then letters, digits and _, at most 64"
            )
        value = values[name]
        literals = tuple([literal(item) for item in value]) if isinstance(value, tuple) else (literal(value),)
        made.append(Parameter(name, isinstance(value, tuple), tuple(map(print_filter, literals)), literals))
    return tuple(made)
