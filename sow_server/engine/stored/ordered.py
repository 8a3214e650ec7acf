"""Values in bytes that have their order: of indexes, and of the least and greatest values of views. Pure.

    value  1 boolean  u8: 0 or 1
           2 number   the nearest float64, no NaN, no -0; its sign bit inverted, if negative all its bits
           3 text     the first 256 bytes of its UTF-8, 0 as 0 255 | 0 0

Values are in order: booleans, numbers by value, texts by code point. That is all of an entry in an index. A view needs
the value itself, so that a number goes on:

    128 u8              it is that float; u8 tells an integer from a float, and which of the two comes first
    129 u16 bytes       it is an integer, and greater by so many bytes
    127 ~u16 ~bytes     it is an integer, and less
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from sow_server.engine.stored.words import u16
from sow_server.engine.values.fields import INTEGER_LIMIT, Kind, Scalar, as_float

TEXT_BYTES_MAX: Final = 256
"""The entry of a longer text has only its beginning."""
TEXT_END: Final = b"\0\0"
FLOAT_BYTES: Final = 9
"""A number's kind and float."""
ORDERED_END: Final = b"\4"
"""Above all values."""
_FLOAT: Final = Struct(">d")
_WORD: Final = Struct(">Q")
_float_bytes: Final = _FLOAT.pack
_word_of: Final = _WORD.unpack
_word_bytes: Final = _WORD.pack
_FLOAT_EXACT: Final = 1 << 53
_SIGN: Final = 1 << 63
_ALL_ONES: Final = (1 << 64) - 1
_EXACT: Final = 128
_MORE: Final = b"\x81"
_LESS: Final = b"\x7f"
_INVERTED: Final = bytes(range(255, -1, -1))


def index_value(kind: Kind, value: Scalar) -> bytes:
    """A value as it is in an entry of an index, its kind in front."""
    if kind is Kind.TEXT:
        assert type(value) is str, "texts are str"
        # UTF-8 has the order of code points. A text of 256 bytes has no more than 256 characters.
        raw = value[:TEXT_BYTES_MAX].encode("utf-8", "surrogatepass")[:TEXT_BYTES_MAX]
        if b"\0" in raw:
            raw = raw.replace(b"\0", b"\0\xff")  # above the end, which a shorter text has in this place
        return b"\3" + raw + TEXT_END
    if kind is Kind.NUMBER:
        assert type(value) is int or type(value) is float, "numbers are int or float"
        (bits,) = _WORD.unpack(_FLOAT.pack(as_float(value) + 0.0))  # -0.0 + 0.0 is 0.0
        return b"\2" + _WORD.pack(bits ^ _ALL_ONES if bits & _SIGN else bits ^ _SIGN)
    return b"\1\1" if value else b"\1\0"


def ordered(value: Scalar, *, integers_last: bool) -> bytes:
    """A value that `read_ordered` gives back: a text of at most TEXT_BYTES_MAX bytes, or anything else but NaN.
    `integers_last`: of equal numbers, an integer comes after a float; else before it."""
    kind = type(value)
    if kind is float or (kind is int and -_FLOAT_EXACT < value < _FLOAT_EXACT):  # type: ignore[operator]  # narrowed by `type() is`
        # `index_value`, without its calls: it runs twice for each change of a record.
        (bits,) = _word_of(_float_bytes(value + 0.0))  # type: ignore[operator]  # as above
        last = b"\x80\1" if (kind is int) is integers_last else b"\x80\0"
        return b"\2" + _word_bytes(bits ^ _ALL_ONES if bits & _SIGN else bits ^ _SIGN) + last
    if kind is int:
        there = index_value(Kind.NUMBER, value)
        rest: int = value - _whole(as_float(value))  # type: ignore[arg-type,operator]  # as above
        if not rest:
            return there + (b"\x80\1" if integers_last else b"\x80\0")
        size = abs(rest).to_bytes((rest.bit_length() + 7) // 8, "big")
        sized = u16(len(size)) + size
        return there + (_MORE + sized if rest > 0 else _LESS + sized.translate(_INVERTED))
    return index_value(Kind.TEXT if kind is str else Kind.BOOLEAN, value)


def read_ordered(key: bytes, at: int, *, integers_last: bool) -> tuple[Scalar, int]:
    """The value at a place of a key, and where it ends."""
    if key[at] == Kind.BOOLEAN:
        return key[at + 1] == 1, at + 2
    if key[at] == Kind.TEXT:
        end = key.index(TEXT_END, at + 1)  # zeros inside a text are followed by 255
        raw = key[at + 1 : end].replace(b"\0\xff", b"\0")
        return raw.decode("utf-8", "surrogatepass"), end + len(TEXT_END)
    (word,) = _WORD.unpack_from(key, at + 1)
    (nearest,) = _FLOAT.unpack(_WORD.pack(word ^ _SIGN if word & _SIGN else word ^ _ALL_ONES))
    mark, at = key[at + FLOAT_BYTES], at + FLOAT_BYTES + 1
    if mark == _EXACT:
        is_integer = (key[at] == 1) is integers_last
        return (int(nearest) if is_integer else nearest), at + 1
    less = mark == _LESS[0]
    sized = key[at : at + 2]
    count = int.from_bytes(sized.translate(_INVERTED) if less else sized, "big")
    end = at + 2 + count
    size = key[at + 2 : end]
    rest = int.from_bytes(size.translate(_INVERTED) if less else size, "big")
    return _whole(nearest) + (-rest if less else rest), end


def _whole(nearest: float) -> int:
    """The integer that the distance of another one is counted from."""
    if nearest in (float("inf"), float("-inf")):
        return INTEGER_LIMIT if nearest > 0 else -INTEGER_LIMIT
    return int(nearest)
