"""Record keys: paths, canonical text, composite keys (rules K3 to K5)."""

from __future__ import annotations

import pytest

from sow_server.engine.values.keys import TOPIC_NAME, KeyFieldError, canonical_text, escape, join, parse_path, split


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("/id", ("id",)),
        ("/a/b", ("a", "b")),
        ("/a/b/c/d", ("a", "b", "c", "d")),
        ("/55", ("55",)),
        ("/[odd name]", ("odd name",)),
        ("/[a/b]", ("a/b",)),
        ("/[a/b]/c", ("a/b", "c")),
        ("/x/[a/b]/[c d]", ("x", "a/b", "c d")),
        ("/[[x]", ("[x",)),
        ("/a[0]", ("a[0]",)),
        ("/a]b", ("a]b",)),
        ("/Größe", ("Größe",)),
        ("/ ", (" ",)),
        ("/[]", ("",)),
        ("/a/[]/b", ("a", "", "b")),
        ("/[a\\]b/c]", ("a]b/c",)),
        ("/[a\\\\]", ("a\\",)),
        ("/[a\\/b]", ("a/b",)),
        ("/[a\\b]", ("a\\b",)),
    ],
)
def test_a_path_is_split_into_steps(path: str, steps: tuple[str, ...]) -> None:
    assert parse_path(path) == steps


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("", "must begin with '/', at 0"),
        ("id", "must begin with '/', at 0"),
        ("[id]", "must begin with '/', at 0"),
        ("/", "has an empty step at 1"),
        ("//a", "has an empty step at 1"),
        ("/a/", "has an empty step at 3"),
        ("/a//b", "has an empty step at 3"),
        ("/[a", "has an unclosed '[' at 1"),
        ("/[a\\]", "has an unclosed '[' at 1"),
        ("/b/[a", "has an unclosed '[' at 3"),
        ("/[a]b", "has an unclosed '[' at 1"),
    ],
)
def test_an_invalid_path_is_refused_with_its_position(path: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_path(path)
    assert fault in str(caught.value)
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"),
        ("", ""),
        ("1.0", "1.0"),
        ("Größe", "Größe"),
        (0, "0"),
        (1, "1"),
        (-7, "-7"),
        (2**64, "18446744073709551616"),
        (10**400, "1" + "0" * 400),
        (1.0, "1"),
        (-1.0, "-1"),
        (0.0, "0"),
        (-0.0, "0"),
        (1e22, "10000000000000000000000"),
        (2.0**53, "9007199254740992"),
        (-(2.0**53), "-9007199254740992"),
        (1e23, "100000000000000000000000"),
        (1.2345678901234568e20, "123456789012345680000"),
        (-1.2345678901234568e20, "-123456789012345680000"),
        (123456789012345680000, "123456789012345680000"),
        (123456789012345683968, "123456789012345683968"),
        (2.0**63, "9223372036854776000"),
        (1.5, "1.5"),
        (0.1, "0.1"),
        (-2.25, "-2.25"),
        (1e-7, "1e-07"),
        (0.1 + 0.2, "0.30000000000000004"),
        (5e-324, "5e-324"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (True, "true"),
        (False, "false"),
    ],
)
def test_a_scalar_has_one_canonical_text(value: object, text: str) -> None:
    assert canonical_text(value) == text


def test_one_as_integer_float_and_text_is_one_key() -> None:
    """keys [2]."""
    assert {canonical_text(value) for value in (1, 1.0, "1")} == {"1"}
    assert canonical_text(True) != canonical_text(1)
    assert canonical_text(True) == canonical_text("true")


@pytest.mark.parametrize(
    ("value", "missing"), [(None, True), ({}, False), ({"a": 1}, False), ([], False), ([1], False), (b"x", False)]
)
def test_only_scalars_have_a_canonical_text(value: object, missing: bool) -> None:
    """Rule K5: never an empty key instead."""
    with pytest.raises(KeyFieldError) as caught:
        canonical_text(value)
    assert caught.value.missing is missing
    assert str(caught.value) == ("is missing or null" if missing else "is not a text, a number or a boolean")


@pytest.mark.parametrize(
    ("texts", "key"),
    [
        (["LH", "400"], "LH|400"),
        (["a|b"], "a\\|b"),
        (["a\\b"], "a\\\\b"),
        (["a|b", "c"], "a\\|b|c"),
        (["a", "b|c"], "a|b\\|c"),
        (["a\\", "b"], "a\\\\|b"),
        (["a\\|b"], "a\\\\\\|b"),
        (["", ""], "|"),
        (["", "a"], "|a"),
        (["a", ""], "a|"),
        (["é"], "é"),
    ],
)
def test_joined_fields_stay_distinguishable(texts: list[str], key: str) -> None:
    assert join(texts) == key
    assert split(key) == texts


def test_text_without_special_characters_is_not_changed_by_escaping() -> None:
    assert escape("plain text/1") == "plain text/1"


@pytest.mark.parametrize("name", ["orders", "a", "A.b_c:d-9", "x" * 200, "_reserved"])
def test_a_topic_name_is_one_to_two_hundred_plain_characters(name: str) -> None:
    assert TOPIC_NAME.match(name)


@pytest.mark.parametrize("name", ["", "x" * 201, "a b", "a/b", "ä", "a\n", "a|b", "a\x00"])
def test_other_topic_names_do_not_match(name: str) -> None:
    assert not TOPIC_NAME.match(name)
