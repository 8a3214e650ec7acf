"""The integers of all layouts: big-endian, so that keys sort like their numbers. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Final

FORMAT: Final = 3
"""The version of the layouts of records and chunks, which carry it."""
DATA_FORMAT: Final = 6
"""The version of everything in a data directory. 4: rows of commits may have notes of publishers. 5: a note may be of
several topics. 6: topics may be views, which have a column family."""
UPGRADED_FORMATS: Final = frozenset({3, 4, 5})
"""Earlier versions, whose rows this one reads. A directory of theirs becomes one of this version at its first start."""
_U16: Final = Struct(">H")
_U32: Final = Struct(">I")
_I64: Final = Struct(">q")


def u16(number: int) -> bytes:
    """Two bytes."""
    return _U16.pack(number)


def u32(number: int) -> bytes:
    """Four bytes."""
    return _U32.pack(number)


def i64(number: int) -> bytes:
    """Eight bytes."""
    return _I64.pack(number)


def i64s(numbers: Sequence[int]) -> list[bytes]:
    """Eight bytes of each: packed together and cut, at half the cost of a call for each."""
    packed = big_endian("q", numbers)
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]


def unpack_i64(eight: bytes) -> int:
    """The number of eight bytes."""
    number: int = _I64.unpack(eight)[0]
    return number


def unpack_u32(four: bytes) -> int:
    """The number of four bytes."""
    return int.from_bytes(four, "big")


def big_endian(typecode: str, numbers: Sequence[int]) -> bytes:
    """Many integers of one `array` type, packed."""
    packed = array(typecode, numbers)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def read_array(typecode: str, value: bytes, at: int, count: int) -> tuple[array[int], int]:
    """The integers packed at a position, and where they end."""
    numbers = array(typecode)
    end = at + numbers.itemsize * count
    numbers.frombytes(value[at:end])
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers, end
