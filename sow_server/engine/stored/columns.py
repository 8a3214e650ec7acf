"""Columns of int64 as the journal stores them: two numbers where a column is constant or counts up by one.

kind u8: 0 constant (one i64), 1 counting up by one (first i64), 2 as it is (i64*count)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TypeAlias

from sow_server.engine.stored.words import big_endian, i64, read_array, unpack_i64


class Column:
    """A column of int64 that stays two numbers while it is constant or counts up by one, as most columns do."""

    __slots__ = ("_first", "_length", "_numbers", "_step")

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self._first = 0
        self._step = 0
        self._length = 0
        self._numbers: array[int] | None = None
        for number in numbers:
            self.append(number)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Column:
        """The same column as one after the other makes it, for one number or many."""
        column = cls()
        first, count = numbers[0], len(numbers)
        if count == 1 or numbers.count(first) == count:
            column._add(first, count, 0)
        elif list(numbers) == list(range(first, first + count)):
            column._add(first, count, 1)
        else:
            column._numbers = array("q", numbers)
        return column

    def __len__(self) -> int:
        return self._length if self._numbers is None else len(self._numbers)

    def __getitem__(self, index: int) -> int:
        return self.tolist()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Column) and self.tolist() == other.tolist()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"Column({self.tolist()})"

    def tolist(self) -> list[int]:
        """The numbers."""
        if self._numbers is not None:
            return self._numbers.tolist()
        if self._step:
            return list(range(self._first, self._first + self._length))
        return [self._first] * self._length

    def part(self, start: int, stop: int) -> list[int]:
        """The numbers from one position to another, without making a list of all."""
        if self._numbers is not None:
            return self._numbers[start:stop].tolist()
        # Without min and max, whose calls would be most of the cost.
        if stop > self._length:
            stop = self._length
        if self._step:
            return list(range(self._first + start, self._first + stop))
        return [self._first] * (stop - start)

    def packed(self, start: int, stop: int) -> array[int]:
        """As `part`, as an array."""
        if self._numbers is not None:
            return self._numbers[start:stop]
        stop = min(stop, self._length)
        if self._step:
            return array("q", range(self._first + start, self._first + stop))
        return array("q", (self._first,)) * (stop - start)

    def append(self, number: int) -> None:
        """Adds one number."""
        if self._numbers is None and self._length == 1 and number == self._first + 1:
            self._step = 1
        self._add(number, 1, self._step)

    def constant(self, number: int, count: int) -> None:
        """Adds `count` times the same number."""
        self._add(number, count, 0)

    def counting(self, first: int, count: int) -> None:
        """Adds `count` numbers that count up by one."""
        if self._length == 1 and self._numbers is None and first == self._first + 1:
            self._step = 1
        self._add(first, count, 1 if count > 1 else self._step)

    def extend(self, other: Column) -> None:
        """Adds another column."""
        if other._numbers is not None:
            self._materialise().extend(other._numbers)
        elif other._step:
            self.counting(other._first, other._length)
        elif other._length:
            self.constant(other._first, other._length)

    def add(self, numbers: Numbers, count: int) -> None:
        """Adds `count` numbers."""
        if isinstance(numbers, int):
            self.constant(numbers, count)
        elif isinstance(numbers, range):
            self.counting(numbers.start, count)
        elif isinstance(numbers, array):
            self.numbers(numbers)
        else:
            self.extend(numbers)

    def numbers(self, numbers: array[int]) -> None:
        """Adds any numbers."""
        if not any(numbers):
            self._add(0, len(numbers), 0)
        else:
            # Origins come as two bytes each.
            self._materialise().extend(numbers if numbers.typecode == "q" else array("q", numbers))

    def _add(self, first: int, count: int, step: int) -> None:
        if self._numbers is None:
            if self._length == 0:
                self._first, self._step, self._length = first, step, count
                return
            if step == self._step and first == self._first + self._step * self._length:
                self._length += count
                return
        self._materialise().extend(range(first, first + count) if step else repeat(first, count))

    def _materialise(self) -> array[int]:
        if self._numbers is None:
            self._numbers = array("q", self.tolist())
        return self._numbers

    def encode(self) -> bytes:
        """The column on disk."""
        if self._numbers is not None:
            return b"\2" + big_endian("q", self._numbers)
        return (b"\1" if self._step else b"\0") + i64(self._first)

    @classmethod
    def decode(cls, value: bytes, at: int, count: int) -> tuple[Column, int]:
        """The column at a position of a journal value, and where it ends."""
        column = cls()
        kind = value[at]
        if kind == 2:
            column._numbers, end = read_array("q", value, at + 1, count)
            return column, end
        column._add(unpack_i64(value[at + 1 : at + 9]), count, kind)
        return column, at + 9


Numbers: TypeAlias = "int | range | array[int] | Column"
"""Numbers for a column: one number for all, consecutive ones, any, or another column."""
