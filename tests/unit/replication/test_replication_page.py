"""docs/replication.md: its configurations load, and go together."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from sow_server.access.file import load_access
from sow_server.config import load
from tests.support.oracles.access import write_private

PAGE = Path(__file__).parents[3] / "docs" / "replication.md"
BLOCKS: list[str] = re.findall(r"```toml\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
ACCESS_FILES = [text for text in BLOCKS if text.startswith("# auth.toml")]
EXAMPLES = [text for text in BLOCKS if text not in ACCESS_FILES]


@pytest.mark.parametrize("text", [text for text in EXAMPLES if "tls" not in text])
def test_an_example_loads_and_replicates(text: str, tmp_path: Path) -> None:
    path = tmp_path / "sow.toml"
    path.write_text(text, encoding="utf-8")
    write_private(tmp_path / "links.token", "token\n")
    assert load(path).replicates


@pytest.mark.parametrize("text", ACCESS_FILES)
def test_an_example_of_an_access_file_loads_and_names_a_peer(text: str, tmp_path: Path) -> None:
    path = tmp_path / "auth.toml"
    write_private(path, text)
    assert load_access(path).peers


def test_every_sender_of_the_examples_is_accepted_with_the_same_token() -> None:
    found = {
        tables["server"]["instance"]: tables for tables in map(tomllib.loads, EXAMPLES) if "tls" not in str(tables)
    }
    assert {"nyc-1", "ldn-1", "a", "source", "eu", "hub", "site-1", "alone"} == set(found)
    for name, tables in found.items():
        for peer in tables["replication"].get("peers", []):
            other = found.get(peer["name"])
            if other is None:
                continue
            replication = other["replication"]
            accepted = {entry["name"] for entry in replication.get("peers", [])} | set(replication.get("accept", []))
            assert name in accepted
            assert replication["token_file"] == tables["replication"]["token_file"]
            assert peer["address"] == other["server"]["listen"]


def test_the_document_names_every_link_to_itself_that_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings
