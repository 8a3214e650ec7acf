"""Man pages: each command has one, which roff takes without a warning, and it says what the help says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import click
import pytest

from sow_cli.command import COMMANDS, sow
from tools import man

PAGES: Final = man.pages()
GROFF: Final = shutil.which("groff")


def plain(roff: str) -> str:
    """The text of a page, without what is for roff."""
    text = re.sub(r"(?m)^\.[A-Za-z]+ ?|^\\&|\\f[BR]", "", roff).replace("\\-", "-").replace("\\e", "\\")
    return " ".join(re.sub(r"\\\[u([0-9A-F]+)\]", lambda found: chr(int(found[1], 16)), text).split())


def test_each_command_has_a_page() -> None:
    assert sorted(PAGES) == sorted(["sow.1", "sow-server.1", *[f"sow-{name}.1" for name in COMMANDS]])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_has_each_option_and_subcommand_of_its_command(name: str) -> None:
    page = plain(PAGES[f"sow-{name}.1"])
    context = click.Context(sow, info_name="sow")
    command = sow.get_command(context, name)
    assert command is not None
    inner = command.commands if isinstance(command, click.Group) else {"": command}
    for word, one in inner.items():
        assert f"sow {name} {word}".strip() in page
        for option in one.params:
            if isinstance(option, click.Option) and option.help and option.expose_value is not False:
                assert all(text in page for text in option.opts), option.opts
                assert " ".join(option.help.split()) in page


def test_the_page_of_the_server_has_its_options_and_variables() -> None:
    page = plain(PAGES["sow-server.1"])
    for word in ("--config FILE", "--accept-loss", "SOW_SERVER_CONFIG", "SOW_SERVER_LISTEN", "[storage]"):
        assert word in page


def test_no_text_is_taken_for_a_request_of_roff() -> None:
    assert man._plain(".so /etc/passwd") == "\\&.so /etc/passwd"
    assert man._plain("'x' a\\x01 --force …") == "\\&'x' a\\ex01 \\-\\-force \\[u2026]"


@pytest.mark.skipif(GROFF is None, reason="groff is not installed")
def test_roff_takes_all_pages_without_a_warning(tmp_path: Path) -> None:
    files = [str(path) for path in man.write(tmp_path / "man1")]
    done = subprocess.run(
        ["groff", "-ww", "-Tutf8", "-man", *files],
        capture_output=True, text=True, check=True, timeout=60, env=os.environ | {"LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert done.stderr == ""
    shown = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
    assert "sow query orders --group-by /site" in " ".join(shown.split())
