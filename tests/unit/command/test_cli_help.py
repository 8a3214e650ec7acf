"""`sow help`: commands, and topics from the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from sow_cli import helping
from sow_cli.command import COMMANDS, sow
from sow_cli.tables import text_width

DOCS: Final = Path(__file__).parents[3] / "docs"


def told(*words: str, **variables: str) -> str:
    result = CliRunner().invoke(sow, ["help", *words], env={"COLUMNS": "80"} | variables)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_without_words_all_commands_and_topics_are_listed() -> None:
    text = told()
    assert text.startswith("Usage: sow [OPTIONS]")
    topics = text.partition("Topics, such as `sow help filters`:")[2].replace(",", "").split()
    assert topics == list(helping.TOPICS)


@pytest.mark.parametrize("words", [("query",), ("topic",), ("topic", "create")], ids=" ".join)
def test_the_help_of_a_command_is_that_of_its_option(words: tuple[str, ...]) -> None:
    assert told(*words) == CliRunner().invoke(sow, [*words, "--help"], env={"COLUMNS": "80"}).stdout


def test_a_topic_is_no_command() -> None:
    """It would hide the help of the command."""
    assert set(helping.TOPICS) & set(COMMANDS) == set()


@pytest.mark.parametrize("topic", helping.TOPICS)
@pytest.mark.parametrize("width", [40, 80])
def test_a_topic_is_its_page_for_a_terminal(topic: str, width: int) -> None:
    text = told(topic, COLUMNS=str(width))
    assert max(map(text_width, text.splitlines())) <= width
    assert text.strip()
    assert re.findall(r"\]\(|\*\*|```|\x1b", text) == [], "no marks of Markdown, no links, no colours in a pipe"
    page, _, section = helping.TOPICS[topic].partition("#")
    source = (DOCS / page).read_text()
    heading = f"(?im)^## ({section.replace('-', '.')})$" if section else "(?m)^# (.*)$"
    title = re.search(heading, source)
    assert title is not None
    assert "".join(title[1].split()) in "".join(text.split())


def test_a_long_topic_lists_its_sections_and_each_can_be_read() -> None:
    names = re.findall(r"sow help filters (\S+)", told("filters"))
    assert names[:3] == ["parameters", "fields", "literals"]
    assert len(names) == len(re.findall(r"^## ", (DOCS / "filters.md").read_text(), re.MULTILINE))
    for name in names:
        assert name.split("-")[0] in told("filters", name).splitlines()[0].lower()
    assert (
        told("filters", "null")
        == told("FILTERS", "Null", "and", "three")
        == told("filters", "null-and-three-truth-values")
    )


def test_a_line_of_code_is_no_heading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.md").write_text("# Keys\n```sh\n## a remark\n```\n## One\nfirst\n" + "more\n\n" * 60)
    monkeypatch.setattr(helping, "_PAGES", (tmp_path,))
    assert re.findall("sow help keys .*", told("keys")) == ["sow help keys one"]
    assert "## a remark" in told("keys")


def test_on_a_terminal_with_colours_headings_stand_out() -> None:
    assert "\x1b[" in told("keys", FORCE_COLOR="1", TERM="xterm-256color")
