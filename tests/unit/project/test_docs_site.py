"""The pages and the hooks of the site: links lead somewhere, and a page reads the same in both forms."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Final

import pytest
import yaml

import sow_client
from sow.v1 import sow_pb2
from tests.support.servers.pages import Block, blocks, matches
from tools import docs_reference, docs_site, docs_text

ROOT: Final = Path(__file__).parents[3]
DOCS: Final = ROOT / "docs"
PAGES: Final = sorted(DOCS.rglob("*.md"))
MADE: Final = docs_reference.pages()


def anchors(text: str) -> set[str]:
    """The addresses of headings, as GitHub makes them, and the ids of rules."""
    lines = [line for _, line in docs_site.lines_outside_fences(text)]
    found: set[str] = set()
    for line in lines:
        if heading := re.match(r"#+ (.+)$", line):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            found.add(next(name for name in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if name not in found))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for number, line in docs_site.lines_outside_fences(page.read_text(encoding="utf-8")):
        for target, place in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?\)", line):
            where = f"{page.name}:{number + 1}: {target}{place}"
            file = page if not target else page.parent / target
            made = MADE.get(posixpath.relpath(posixpath.normpath(file.as_posix()), DOCS.as_posix()))
            assert made or file.exists(), where
            if place and made:
                assert f"{{ {place} }}" in made, where
            elif place and file.suffix == ".md":
                assert place[1:] in anchors(file.read_text(encoding="utf-8")), where


def test_the_navigation_has_every_page() -> None:
    """A page that nobody finds is no page. The records of decisions are listed on a page of their own."""

    def entries(part: object) -> list[str]:
        if isinstance(part, str):
            return [part]
        parts = part.values() if isinstance(part, dict) else part
        assert isinstance(parts, list) or hasattr(parts, "__iter__")
        return [entry for one in parts for entry in entries(one)]

    text = re.sub(r"!!python\S+ \{.*\}", "null", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    there = entries(yaml.safe_load(text)["nav"])
    expected = {page.relative_to(DOCS).as_posix() for page in PAGES} | MADE.keys()
    assert sorted(there) == sorted(name for name in expected if not re.match("decisions/0", name))


COLOUR: Final = re.compile(r"#[0-9a-f]{3}(?:[0-9a-f]{3})?\b")


@pytest.mark.parametrize("file", ["site.css", "pictures/life.svg"])
def test_the_site_has_the_colours_of_the_console(file: str) -> None:
    """Also in dark: who comes from the one to the other sees one product."""
    console = (ROOT / "clients" / "sow_console" / "static" / "console.css").read_text(encoding="utf-8")
    used = set(COLOUR.findall((DOCS / file).read_text(encoding="utf-8")))
    assert len(used) >= 20
    assert used <= set(COLOUR.findall(console))


def test_a_list_gets_the_blank_line_that_the_site_needs() -> None:
    page = "Text:\n- one\n  more\n- two\n\n```sh\nText\n- none\n```\n| `a\\|b` |\n"
    assert docs_site.with_blank_lines(page) == (
        "Text:\n\n- one\n    more\n- two\n\n```sh\nText\n- none\n```\n| `a|b` |\n"
    )


def test_the_parts_of_an_item_get_the_indentation_that_the_site_needs() -> None:
    page = (
        "- one\n\n      code\n\n  more\n  - inner\n\n1. first\n   still\n\n   ```sh\n   run\n   ```\n\nText\n  none\n"
    )
    assert docs_site.with_blank_lines(page) == (
        "- one\n\n        code\n\n    more\n    - inner\n\n"
        "1. first\n    still\n\n    ```sh\n    run\n    ```\n\nText\n  none\n"
    )


def test_a_link_out_of_the_pages_leads_to_a_page_that_shows_the_file() -> None:
    assert "deploy/prometheus/sow.rules.yml" in docs_site.linked_files()
    linked = docs_site.with_links("[a](../deploy/prometheus/sow.rules.yml) [b](rules.md#k1)", "docs/deploy.md")
    assert linked == "[a](source/deploy/prometheus/sow.rules.yml.md) [b](rules.md#k1)"
    assert "alert: SowDown" in docs_site.shown("deploy/prometheus/sow.rules.yml")
    folder = docs_site.shown("deploy/examples/one")
    assert "## sow.toml" in folder
    assert "[server.tls]" in folder
    assert docs_site.with_links("[a](docs/cli.md)", "README.md") == "[a](../cli.md)"


def test_the_pages_of_the_contract_have_every_call_and_field_with_its_meaning() -> None:
    page = MADE["reference/rpc/sow.md"]
    for method in sow_pb2.DESCRIPTOR.services_by_name["SowService"].methods:
        assert f"| `{method.name}` |" in page
    for message in sow_pb2.DESCRIPTOR.message_types_by_name.values():
        assert f"## {message.name} {{ #{message.name.lower()} }}" in page
    rows = [line for name, text in MADE.items() if "/rpc/" in name for line in text.splitlines() if line[:3] == "| `"]
    assert len(rows) > 800
    assert [row for row in rows if row.endswith("|  |")] == [], "a field without a comment"


def test_the_pages_of_the_client_have_every_public_name_once() -> None:
    named = re.findall(r"^::: sow_client\.(\w+)$", "\n".join(MADE.values()), re.MULTILINE)
    assert len(named) == len(set(named))
    classes = {name for name in sow_client.__all__ if isinstance(getattr(sow_client, name), type)}
    assert classes == set(named)


def test_the_page_of_settings_has_no_value_of_this_machine() -> None:
    page = MADE["reference/settings.md"]
    assert '| `listen` | `"127.0.0.1:7450"` | – | `SOW_SERVER_LISTEN` |' in page
    assert str(ROOT) not in page


def test_a_help_text_reads_the_same_as_markdown() -> None:
    text = "With --csv-safe: _payload, retain_time, [x<5], 'eu-*'; `sow get --raw` and --if-absent."
    assert docs_text.prose(text) == (
        "With `--csv-safe`: \\_payload, retain_time, \\[x&lt;5\\], 'eu-\\*'; `sow get --raw` and `--if-absent`."
    )
    assert docs_text.cell("a|b `c|d`\n e") == "a&#124;b `c|d` e"


def test_the_pages_of_the_command_have_the_names_of_the_help() -> None:
    page = MADE["reference/command/index.md"]
    assert "| `-h, --help` |" in page
    assert "| `--server HOST:PORT[,…]` |" in page
    assert str(Path.home()) not in page


def test_the_monitoring_page_asks_for_metrics_that_the_server_has() -> None:
    page = (DOCS / "operations" / "monitoring.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {re.sub("_bucket$", "", name) for name in re.findall(r"\b(?:sow|process)_\w+", page)} - {"sow_"}
    assert len(asked) > 8
    assert asked <= documented


# -- how tests read a page --------------------------------------------------------------------------------------------


def test_blocks_and_rows_of_a_page_are_found_in_order(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "| Redis | sow | |\n|---|---|---|\n| `GET a` | `sow get kv a \\| wc` | |\n| `X` | nothing |\n\n"
        '```sh title="as root (not tested)"\nrm\n```\n| a | b |\n'
    )
    assert blocks(page) == [
        Block("row", "Redis", "sow get kv a | wc", 3, ("GET a",)),
        Block("sh", "as root (not tested)", "rm\n", 6),
    ]
    assert not blocks(page)[1].is_run


@pytest.mark.parametrize(
    ("shown", "told", "fits"),
    [
        ("a … c", "a b c\r\n", True),
        ("a\n…\nc", "a\nb\nb\nc\n", True),
        ("a\n…", "a\n", True),
        ("a", "a\nb\n", False),
        ("a.c", "abc\n", False),
        ("a", "\x1b[1ma\x1b[0m   \n", True),
    ],
)
def test_an_output_is_compared_with_the_one_that_is_shown(shown: str, told: str, fits: bool) -> None:
    assert matches(shown, told) == fits
