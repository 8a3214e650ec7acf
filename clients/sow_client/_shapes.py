"""The types of the values of a field over all records, so that a column of Parquet or Arrow holds every one of them.

[1]  A column has one type. Whole numbers become floats beside floats, an object gets the fields of all objects. Values
     that no type holds exactly have none in common, and are JSON text.
[2]  `keeps` tells whether a value comes back from its column as it was, also its type: 1 is not 1.0, and an object with
     a null is another than one without the field.
"""

from __future__ import annotations

from datetime import datetime
from itertools import chain
from math import isfinite
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

DataType: TypeAlias = Any
"""A pyarrow.DataType: pyarrow has no annotations."""
_EXACT_IN_FLOAT: Final = 2**53


class Shape:
    """The knowledge about the values of one field. It grows with `add`."""

    __slots__ = ("count", "has_whole_floats", "high", "items", "kinds", "low", "members")

    def __init__(self) -> None:
        self.kinds: set[type] = set()
        """Their types; that of null among them."""
        self.count = 0
        """The number of values, nulls included."""
        self.low = self.high = 0
        """The least and the largest whole number."""
        self.has_whole_floats = False
        """True: one is a float without a fraction, such as 1.0."""
        self.members: dict[str, Shape] = {}
        """The shapes of the members of the objects."""
        self.items: Shape | None = None
        """The shape of the items of all arrays."""

    def add(self, values: list[Any]) -> None:
        """Some more values."""
        kinds = set(map(type, values))
        self.kinds |= kinds
        self.count += len(values)
        if int in kinds:
            numbers = [one for one in values if type(one) is int]
            numbers += [self.low, self.high]
            self.low, self.high = min(numbers), max(numbers)
        if float in kinds and not self.has_whole_floats:
            self.has_whole_floats = any(one.is_integer() for one in values if type(one) is float)
        if dict in kinds:
            columns: dict[str, list[Any]] = {}
            for one in values:
                if type(one) is dict:
                    for name, value in one.items():
                        columns.setdefault(name, []).append(value)
            for name, column in columns.items():
                self.members.setdefault(name, Shape()).add(column)
        if list in kinds:
            self.items = self.items or Shape()
            self.items.add(list(chain.from_iterable([one for one in values if type(one) is list])))

    @property
    def is_whole(self) -> bool:
        """True: in a column of floats, each without a fraction stands for a whole number."""
        return self.kinds - {NoneType} == {int, float} and not self.has_whole_floats

    def kind(self, pa: ModuleType) -> DataType | None:
        """The type of a column that holds the values; None: there is none but their text ([1])."""
        kinds = self.kinds - {NoneType}
        if not kinds:
            return pa.null()
        if kinds == {int}:
            return pa.int64() if self.low >= -(2**63) and self.high < 2**63 else self._unsigned(pa)
        if kinds == {int, float}:
            return pa.float64() if self.low >= -_EXACT_IN_FLOAT and self.high <= _EXACT_IN_FLOAT else None
        if kinds == {dict}:
            fields = {name: shape.kind(pa) for name, shape in self.members.items()}
            return None if None in fields.values() or not fields else pa.struct(list(fields.items()))
        if kinds == {list}:
            item = Shape.kind(self.items, pa) if self.items is not None else pa.null()
            return None if item is None else pa.list_(item)
        if len(kinds) > 1:
            return None
        return {
            str: pa.string(), bool: pa.bool_(), float: pa.float64(), bytes: pa.binary(),
            datetime: pa.timestamp("us", tz="UTC"),
        }.get(kinds.pop())  # fmt: skip

    def _unsigned(self, pa: ModuleType) -> DataType | None:
        return pa.uint64() if self.low >= 0 and self.high < 2**64 else None

    def fits(self, pa: ModuleType, kind: DataType) -> bool:
        """True if a column of this type takes all values exactly. Arrow itself would cut 2.5 to 2, and drop fields of
        objects."""
        kinds, types = self.kinds - {NoneType}, pa.types
        if not kinds:
            return True
        if types.is_struct(kind):
            inside = {field.name: field.type for field in kind}
            return kinds == {dict} and all(
                name in inside and shape.fits(pa, inside[name]) for name, shape in self.members.items()
            )
        if types.is_list(kind):
            return kinds == {list} and (self.items is None or self.items.fits(pa, kind.value_type))
        if kind == pa.float64():
            return kinds <= {int, float} and self.low >= -_EXACT_IN_FLOAT and self.high <= _EXACT_IN_FLOAT
        if kind == pa.int64():
            return kinds == {int} and self.low >= -(2**63) and self.high < 2**63
        if kind == pa.uint64():
            return kinds == {int} and self._unsigned(pa) is not None
        return len(kinds) == 1 and self.kind(pa) == kind

    def keeps(self, value: object, kind: DataType | None, *, whole: bool = False) -> bool:
        """True if a column of this type gives this value back ([2]). `whole`: see `is_whole`. A null is for the caller
        to judge."""
        if value is None:
            return True
        if kind is None:
            return type(value) is str
        if isinstance(value, float):
            return isfinite(value)  # documents have no other numbers
        if isinstance(value, int) and not isinstance(value, bool):
            return whole or float not in self.kinds
        if isinstance(value, dict):
            names = self.members
            return all(
                one is not None and name in names and names[name].keeps(one, kind) for name, one in value.items()
            )
        if isinstance(value, list):
            return self.items is None or all(self.items.keeps(one, kind) for one in value)
        return isinstance(value, (str, bool))

    def keeps_all(self, kind: DataType | None, *, whole: bool = False) -> bool:
        """True if a column of this type gives all values back; False also where it may."""
        kinds = self.kinds - {NoneType}
        if not kinds <= {str, bool, int, float, dict, list}:
            return False
        if kind is None:
            return kinds <= {str}
        if kinds == {int, float} and not whole:
            return False
        nested: Iterable[Shape] = chain(self.members.values(), () if self.items is None else (self.items,))
        if any(NoneType in one.kinds for one in self.members.values()):
            return False
        return all(one.keeps_all(kind) for one in nested)
