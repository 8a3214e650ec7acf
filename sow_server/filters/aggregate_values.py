"""The values of aggregates: what is kept for each, how values are added, and what they amount to (rule Q11). Pure.

    [1]  Each result is a function of the set of the values that were added, whatever their order, and however they were
         divided among calls. So every instance answers with the same bytes.
    [2]  A sum is an integer over a power of two, which holds every sum of floats and integers exactly. It is rounded
         once, when it is asked for. So values may also be taken back, exactly: counts and sums know `take` and `move`,
         and may be kept between processes (`dump`).
    [3]  Values come as clean columns (`clean`): null, booleans, numbers, texts of at most TEXT_BYTES_MAX, and LONG.

`add` and `take` get the types that may be among the values, and return by how many bytes the state has grown. Its
memory is that, and the BYTES that it has at first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from operator import neg
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from sow_server.engine.values.fields import INTEGER_LIMIT, Kind, number_of
from sow_server.filters.aggregate_calls import KEY_BYTES_MAX, LONG, is_long
from sow_server.filters.values import first, text_of

Types: TypeAlias = set[type]

TEXT_BYTES_MAX: Final = 256
"""A longer text counts, and is null to all other aggregates."""
_NULL: Final = type(None)
_INTS: Final[Types] = {int}
_FLOATS: Final[Types] = {float}
_TEXTS: Final = {str}
_WHOLE: Final = {int, bool, _NULL}
_NUMBERS: Final = {int, float, bool, _NULL}
_CALCULATED: Final = {int, float, _NULL}
"""Sets that are made once, as a column is compared with several of them."""
_SHORT_CHARACTERS: Final = TEXT_BYTES_MAX // 4
"""So many characters are surely no more bytes than allowed."""
_ENTRY_BYTES: Final = 60
"""Memory of an entry of a set, besides its text."""
_PART_BYTES: Final = 40
"""Memory of a float in a list."""
_WORD: Final = 1 << 63
_FEW: Final = 6
"""So many floats are added one by one as fast as together."""


def clean(column: Sequence[object]) -> tuple[Sequence[object], Types]:
    """Values of fields as aggregates take them, and their types [3]: an array is its first element, and a float that is
    no number is null."""
    types = set(map(type, column))
    if types <= _WHOLE:
        return column, types
    if types == _FLOATS and (total := sum(column)) == total:  # type: ignore[arg-type]  # all of them are floats
        return column, types
    if types <= _NUMBERS:
        cleaned: list[object] = [None if value != value else value for value in column]
        return cleaned, set(map(type, cleaned))  # null may be new among them
    if types == _TEXTS and max(map(len, column)) <= _SHORT_CHARACTERS:  # type: ignore[arg-type]  # all of them are texts
        return column, types
    cleaned = list(map(_clean, column))
    return cleaned, set(map(type, cleaned))


def clean_names(column: Sequence[object]) -> tuple[Sequence[object], Types]:
    """Values that name groups, and their types: null stands for those that name none, such as an array."""
    types = set(map(type, column))
    if types <= _NUMBERS:
        return column, types
    if types == _TEXTS and max(map(len, column)) <= KEY_BYTES_MAX:  # type: ignore[arg-type]  # all of them are texts
        return column, types
    named = [value if type(value) in _NAMING and not is_long(value) else None for value in column]
    return named, set(map(type, named))


_NAMING: Final = frozenset([str, int, float, bool])


def characters(column: Sequence[object], types: Types) -> int:
    """The characters of all texts of a column."""
    if str not in types:
        return 0
    texts = column if types == _TEXTS else [value for value in column if type(value) is str]
    return len("".join(texts))  # type: ignore[arg-type]  # texts; less than half the time of their lengths


def _clean(value: object) -> object:
    value = first(value)
    kind = type(value)
    if kind is str:
        text: str = value  # type: ignore[assignment]  # narrowed by `type() is`
        return (
            value
            if len(text) <= _SHORT_CHARACTERS or len(text.encode(errors="surrogatepass")) <= TEXT_BYTES_MAX
            else LONG
        )
    return value if value is None or kind in (bool, int, float) else LONG


class State(Protocol):
    """The part of an aggregate that is kept for a group."""

    BYTES: ClassVar[int]

    def add(self, values: Sequence[object], types: Types) -> int: ...


class Count:
    """How many values are not null."""

    BYTES: ClassVar[int] = 72
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def add(self, values: Sequence[object], types: Types) -> int:
        self.count += _present(values, types)
        return 0

    def take(self, values: Sequence[object], types: Types) -> int:
        self.count -= _present(values, types)
        return 0

    def move(self, added: Sequence[object], taken: Sequence[object], types: Types) -> None:
        """As `add` and `take`, in one go."""
        self.count += _present(added, types) - _present(taken, types)

    def dump(self) -> list[object]:
        """The state as a number."""
        return [self.count]

    def load(self, dumped: Sequence[Any]) -> None:
        """The state that was dumped."""
        (self.count,) = dumped


def _present(values: Sequence[object], types: Types) -> int:
    return len(values) - (sum([value is None for value in values]) if _NULL in types else 0)


class Sum:
    """The exact sum of numbers and numeric texts [2]."""

    BYTES: ClassVar[int] = 250
    __slots__ = ("_floats", "_negative", "_numerator", "_parts", "_positive", "_shift", "count")

    def __init__(self) -> None:
        self.count = 0
        """How many numbers there are."""
        self._numerator = 0
        self._shift = 0
        """The sum is the numerator over 2 to this, and the parts."""
        self._parts: list[float] = []
        """A few floats: adding to them is quicker than to the numerator, and as exact."""
        self._floats = 0
        """How many of the numbers are floats; with one, the sum is one."""
        self._positive = 0
        """How many are infinite; likewise below."""
        self._negative = 0

    def add(self, values: Sequence[object], types: Types) -> int:
        return self._put(values, types, 1)

    def take(self, values: Sequence[object], types: Types) -> int:
        return self._put(values, types, -1)

    def move(self, added: Sequence[object], taken: Sequence[object], types: Types) -> None:
        """As `add` and `take`, in one go. A few floats go into the numerator, as it is asked for anyway."""
        if types == _INTS:
            self.count += len(added) - len(taken)
            self._numerator += sum(added) - sum(taken) << self._shift  # type: ignore[arg-type]  # all are integers
            return
        if types == _FLOATS:
            signed: list[float] = [*added, *[-number for number in taken]]  # type: ignore[list-item,operator]  # all are floats
            try:
                if len(signed) > _FEW:
                    signed = _parts(signed)
                numerator, shift = self._numerator, self._shift
                for number in signed:  # `_added`, without the calls
                    more, denominator = number.as_integer_ratio()
                    wanted = denominator.bit_length() - 1
                    if wanted > shift:
                        numerator, shift = numerator << (wanted - shift), wanted
                    numerator += more << (shift - wanted)
            except (OverflowError, ValueError):  # as in `_put`
                pass
            else:
                self._numerator, self._shift = numerator, shift
                self.count += len(added) - len(taken)
                self._floats += len(added) - len(taken)
                return
        self._put(added, types, 1)
        self._put(taken, types, -1)
        self._join_parts()

    def dump(self) -> list[object]:
        """The state as numbers and bytes."""
        numerator = self._numerator
        whole: object = numerator
        if not -_WORD <= numerator < _WORD:
            whole = numerator.to_bytes(numerator.bit_length() // 8 + 1, "big", signed=True)
        return [self.count, whole, self._shift, self._parts, self._floats, self._positive, self._negative]

    def load(self, dumped: Sequence[Any]) -> None:
        """The state that was dumped."""
        self.count, whole, self._shift, self._parts, self._floats, self._positive, self._negative = dumped
        self._numerator = whole if type(whole) is int else int.from_bytes(whole, "big", signed=True)

    @property
    def total(self) -> int | float | None:
        """The sum, rounded once: an integer if all numbers are, else a float. None: of nothing, or beyond bounds."""
        if not self.count or self._positive or self._negative:
            return None
        numerator, shift = self._exact() if self._parts else (self._numerator, self._shift)
        if not self._floats:
            whole = numerator >> shift
            return whole if -INTEGER_LIMIT < whole < INTEGER_LIMIT else None
        return _quotient(numerator, 1 << shift)

    @property
    def average(self) -> float | None:
        """The exact sum divided by the count, rounded once."""
        if not self.count or self._positive or self._negative:
            return None
        numerator, shift = self._exact() if self._parts else (self._numerator, self._shift)
        return _quotient(numerator, self.count << shift)

    def _put(self, values: Sequence[object], types: Types, sign: int) -> int:
        if types == _FLOATS:
            return self._put_floats(values, sign)  # type: ignore[arg-type]  # all of them are floats
        if types == _INTS:
            return self._put_ints(values, sign)  # type: ignore[arg-type]  # all of them are integers
        numbers = values if types <= _CALCULATED else list(map(number_of, values))
        ints = [number for number in numbers if type(number) is int]
        floats = [number for number in numbers if type(number) is float]
        return self._put_ints(ints, sign) + (self._put_floats(floats, sign) if floats else 0)

    def _put_ints(self, ints: Sequence[int], sign: int) -> int:
        before = self._numerator
        self.count += sign * len(ints)
        self._numerator += sign * sum(ints) << self._shift
        return self._numerator.bit_length() // 7 - before.bit_length() // 7

    def _put_floats(self, floats: Sequence[float], sign: int) -> int:
        self.count += sign * len(floats)
        self._floats += sign * len(floats)
        before = len(self._parts)
        try:
            self._parts = _parts([*self._parts, *(floats if sign > 0 else map(neg, floats))])
        except (OverflowError, ValueError):  # beyond the range of floats on the way, or infinite
            grown = -self._growing_bytes()
            self._join_parts()
            for number in floats:
                self._put_float(number, sign)
            return grown + self._growing_bytes()
        return _PART_BYTES * (len(self._parts) - before)

    def _growing_bytes(self) -> int:
        return self._numerator.bit_length() // 7 + _PART_BYTES * len(self._parts)

    def _exact(self) -> tuple[int, int]:
        """The numerator with the parts in it, and its shift. They are not kept: they take ten times the memory."""
        numerator, shift = self._numerator, self._shift
        for part in self._parts:
            numerator, shift = _added(numerator, shift, part)
        return numerator, shift

    def _join_parts(self) -> None:
        self._numerator, self._shift = self._exact()
        self._parts = []

    def _put_float(self, number: float, sign: int) -> None:
        if math.isfinite(number):
            self._numerator, self._shift = _added(self._numerator, self._shift, sign * number)
        elif number > 0:
            self._positive += sign
        else:
            self._negative += sign


def _added(numerator: int, shift: int, number: float) -> tuple[int, int]:
    """The numerator and the shift of a sum with one more float."""
    more, denominator = number.as_integer_ratio()
    wanted = denominator.bit_length() - 1
    if wanted > shift:
        numerator, shift = numerator << (wanted - shift), wanted
    return numerator + (more << (shift - wanted)), shift


def _parts(floats: list[float]) -> list[float]:
    """A few floats whose exact sum is that of many, which it takes. Raises OverflowError or ValueError where there are
    none, or where it does not find them."""
    parts: list[float] = []
    while total := math.fsum(floats):
        if total - total != 0:
            raise OverflowError
        parts.append(total)
        floats.append(-total)  # what is left is at least 2^53 times smaller each time
    return parts


_ORDERED: Final = ((Kind.BOOLEAN, bool), (Kind.NUMBER, int), (Kind.NUMBER, float), (Kind.TEXT, str))


def _quotient(numerator: int, denominator: int) -> float | None:
    """Correctly rounded, as Python divides integers; None: beyond the range of floats."""
    try:
        return numerator / denominator
    except OverflowError:
        return None


class Extreme:
    """The least or the greatest value, in the order of `order_by`: booleans, numbers, texts. Of equal numbers an
    integer is preferred."""

    BYTES: ClassVar[int] = 150
    __slots__ = ("_numeric", "_rank", "greatest", "value")

    def __init__(self, *, greatest: bool, numeric: bool) -> None:
        """`numeric`: a numeric text is a number, as in fix and nvfix."""
        self.greatest: Final = greatest
        self._numeric = numeric
        self._rank = 0
        self.value: bool | int | float | str | None = None

    def add(self, values: Sequence[Any], types: Types) -> int:
        best = max if self.greatest else min
        if types == _FLOATS:
            return self._offer(Kind.NUMBER, best(values) + 0.0)  # -0.0 is 0.0
        if types == _INTS:
            return self._offer(Kind.NUMBER, best(values))
        if types == _TEXTS and not self._numeric:
            return self._offer(Kind.TEXT, best(values))
        if self._numeric:
            values = [value if (number := number_of(value)) is None else number for value in values]
        grown = 0
        for kind, type_ in _ORDERED:
            some: list[Any] = [value for value in values if type(value) is type_]
            if some:
                grown += self._offer(kind, best(some) + 0.0 if type_ is float else best(some))
        return grown

    def _offer(self, kind: Kind, value: bool | int | float | str) -> int:
        old = self.value
        if old is not None:
            if kind == self._rank:
                if value == old:
                    if type(value) is not int:
                        return 0
                elif (value > old) is not self.greatest:  # type: ignore[operator]  # of one kind
                    return 0
            elif (kind > self._rank) is not self.greatest:
                return 0
        self._rank = kind
        self.value = value
        return sys.getsizeof(value) - sys.getsizeof(old)


class Distinct:
    """The different values, by canonical text: as many as there would be groups."""

    BYTES: ClassVar[int] = 280
    __slots__ = ("_texts",)

    def __init__(self) -> None:
        self._texts: set[str] = set()

    def add(self, values: Sequence[object], types: Types) -> int:
        texts = {text for value in values if (text := text_of(value)) is not None} - self._texts
        self._texts |= texts
        return sum(map(sys.getsizeof, texts)) + _ENTRY_BYTES * len(texts)

    @property
    def count(self) -> int:
        return len(self._texts)
