"""Colours: whether there are any, which, and that they are all that a terminal gets besides the result."""

from __future__ import annotations

import json
import re

import click
import hypothesis
import pytest
from click.testing import CliRunner, _NamedTextIOWrapper
from hypothesis import strategies as st

from sow_cli import colours
from sow_cli.command import sow
from tests.support.fakes.fake_client import FakeClient

STYLE = re.compile("\x1b\\[[0-9;]*m")
VARIABLES = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", colours.VARIABLE)
QUERY = ("query", "orders", "--format", "ndjson")


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def shown(*arguments: str, is_terminal: bool = True, **variables: str) -> str:
    client = FakeClient()
    client.add("orders", records=[{"id": 1, "name": 'a "b": 1', "n": -2.5e9, "on": True, "no": None}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_NamedTextIOWrapper, "isatty", lambda _: is_terminal, raising=False)
        result = CliRunner().invoke(sow, arguments, env=variables, obj=lambda _session: client)
    assert result.exit_code == 0, result.stderr
    return result.stdout_bytes.decode()


@pytest.mark.parametrize(
    ("given", "variables", "is_terminal", "expected"),
    [
        ((), {}, True, True),
        ((), {}, False, False),
        ((), {"TERM": "dumb"}, True, False),
        ((), {"CLICOLOR": "0"}, True, False),
        ((), {"NO_COLOR": "1"}, True, False),
        ((), {"NO_COLOR": ""}, True, True),
        ((), {"FORCE_COLOR": "1"}, False, True),
        ((), {"CLICOLOR_FORCE": "1", "TERM": "dumb"}, False, True),
        ((), {"CLICOLOR_FORCE": "0"}, False, False),
        ((), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        (("--color", "never"), {"FORCE_COLOR": "1"}, True, False),
        (("--color", "always"), {"NO_COLOR": "1"}, False, True),
        (("--color", "auto"), {"NO_COLOR": "1"}, True, False),
    ],
)
@pytest.mark.parametrize("is_behind", [False, True], ids=["in front", "behind"])
def test_the_first_that_speaks_of_colours_decides(
    given: tuple[str, ...], variables: dict[str, str], is_terminal: bool, expected: bool, is_behind: bool
) -> None:
    arguments = ("topics", "--format", "table")
    line = (*arguments, *given) if is_behind else (*given, *arguments)
    assert ("\x1b[" in shown(*line, is_terminal=is_terminal, **variables)) is expected


@pytest.mark.parametrize("output_format", ["ndjson", "json"])
def test_json_has_colours_on_a_terminal_and_none_in_a_pipe_or_a_file(output_format: str) -> None:
    arguments = ("query", "orders", "--format", output_format)
    exact = shown(*arguments, is_terminal=False)
    assert shown(*arguments, "--color", "always", is_terminal=False, FORCE_COLOR="1") == exact
    coloured = shown(*arguments)
    assert coloured != exact
    assert STYLE.sub("", coloured) == exact
    assert shown(*arguments, "--color", "never") == exact


def test_each_part_of_json_has_its_style() -> None:
    line = shown(*QUERY, SOW_COLORS="name=1:text=2:number=3:word=4")
    assert r'"name"[0m:[2m"a \"b\": 1"[0m' in line.replace("\x1b", "")
    for part in ('[1m"n"', "[3m-2500000000.0[0m", "[4mtrue[0m", "[4mnull[0m"):
        assert f"\x1b{part}".replace("[0m", "\x1b[0m") in line


def test_themes_and_single_styles() -> None:
    assert '\x1b[36m"id"' in shown(*QUERY)
    assert '\x1b[34m"id"' in shown(*QUERY, SOW_COLORS="light")
    assert '\x1b[1;35m"id"' in shown(*QUERY, SOW_COLORS="light:name=1;35")
    assert '"id"\x1b' not in shown(*QUERY, SOW_COLORS="name=")


@pytest.mark.parametrize("given", ["kay=1", "name=red", "name=1;2m\x1b[2J", "blue", "name=1000", "dark=1"])
def test_a_style_that_is_none_is_told(given: str) -> None:
    with pytest.raises(click.UsageError) as told:
        colours.styles(given)
    assert "SOW_COLORS: " in told.value.message
    assert "\x1b" not in told.value.message
    assert "styles are heading, faint, name" in told.value.message


def test_whenever_json_has_colours_it_is_the_same_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )

    @hypothesis.given(values)
    def check(value: object) -> None:
        for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, indent=2)):
            assert STYLE.sub("", colours.json(text)) == text.replace("\x1b", "")

    check()
