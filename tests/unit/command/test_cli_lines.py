"""Reading lines: bounded memory, and line numbers that stay right whatever is skipped."""

from __future__ import annotations

import io
import random
from io import BufferedReader

import msgspec
import pytest

from sow_cli import lines
from sow_cli.lines import BadLine, LineNumbers, chunks, keyed_by, record_form
from sow_client import PayloadForm


class _Trickle(io.RawIOBase):
    """A pipe that hands over a few bytes at a time."""

    def __init__(self, data: bytes, sizes: random.Random) -> None:
        self._data = data
        self._sizes = sizes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the typeshed name of the type is private
        size = self._sizes.randint(1, 5)
        part, self._data = self._data[:size], self._data[size:]
        buffer[: len(part)] = part
        return len(part)


@pytest.mark.parametrize("seed", range(20))
def test_lines_do_not_depend_on_how_they_arrive(seed: int) -> None:
    sizes = random.Random(seed)
    data = b"".join(b"x" * sizes.randint(0, 7) + b"\n" for _ in range(50)) + sizes.choice([b"", b"end"])

    read = [line for chunk in chunks(BufferedReader(_Trickle(data, sizes))) for line in chunk]

    assert read == data.split(b"\n")[: None if not data.endswith(b"\n") else -1], f"seed {seed}"


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_takes_one_place_and_the_next_ones_follow(
    monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 10)
    data = b"a\n" + b"x" * 500 + b"\nb\n" + b"y" * 300 + end

    read = [line for chunk in chunks(BufferedReader(_Trickle(data, random.Random(1)))) for line in chunk]

    assert read == [b"a", None, b"b", None]


def test_a_line_that_is_too_long_is_found_also_when_it_comes_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 10)

    read = [line for chunk in chunks(BufferedReader(io.BytesIO(b"a\n" + b"x" * 500 + b"\nb\n"))) for line in chunk]

    assert read == [b"a", None, b"b"]


@pytest.mark.parametrize("seed", range(20))
def test_positions_map_back_to_lines(seed: int) -> None:
    choice = random.Random(seed)
    numbers = LineNumbers()
    expected: list[int] = []
    for line in range(1, 200):
        if choice.random() < 0.3:
            numbers.skip(len(expected))
        else:
            expected.append(line)

    assert [numbers.line(position) for position in range(len(expected))] == expected, f"seed {seed}"


@pytest.mark.parametrize(
    ("path", "document"),
    [("/a/b", {"a": {"b": "x"}}), ("/[a/b]", {"a/b": "x"}), (r"/[a\]b]/c", {"a]b": {"c": "x"}})],
)
def test_a_key_field_is_a_path_as_everywhere(path: str, document: object) -> None:
    """Story: a name in brackets was taken apart at its slash."""
    assert keyed_by(path)(msgspec.json.encode(document)).key == "x"


@pytest.mark.parametrize("wrong", ["", "/", "/a//b", "/[a"])
def test_a_key_field_that_is_no_path_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"path|empty"):
        keyed_by(wrong)


def test_a_key_field_may_be_a_name_with_any_characters() -> None:
    assert keyed_by("a.b c")(b'{"a.b c":"x"}').key == "x"


def test_a_key_of_many_digits_is_exact() -> None:
    assert keyed_by("id")(b'{"id":123456789012345678901234567890}').key == "123456789012345678901234567890"


@pytest.mark.parametrize("line", [b"[]", b"{", b'{"key":"a"}', b'{"payload":{},"key":7}'])
def test_a_line_that_is_no_record_is_malformed(line: bytes) -> None:
    with pytest.raises(BadLine) as caught:
        record_form(PayloadForm(), with_key=True, stamps=True, absent=None)(line)
    assert caught.value.reason == "PAYLOAD_MALFORMED"


def test_a_record_of_another_type_needs_base64_text() -> None:
    with pytest.raises(BadLine) as caught:
        record_form(PayloadForm("binary"), with_key=True, stamps=True, absent=None)(b'{"key":"a","payload":{}}')
    assert caught.value.reason == "PAYLOAD_MALFORMED"
