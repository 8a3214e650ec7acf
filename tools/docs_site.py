"""Hooks of MkDocs: the site from `docs/`, from the files that its pages link to, and from the code.

[1]  A page reads the same on the site as where the repository is shown. Links, lists and tables are put into the form
     that Python-Markdown needs; nobody writes for the site.
[2]  A link to a file or folder outside of `docs/` leads to a page that shows it. So the site is complete without the
     repository and without a network.
[3]  The pages below `reference/` that do not exist as files are made from the code at each build (`docs_reference`).
[4]  Each rule that a page cites is a link to its text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools import docs_reference

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = "docs"
SOURCE: Final = "source"
"""The folder of the site with the pages of [2]."""
SHOWN_BYTES_MAX: Final = 100_000
"""A larger file of a folder is named and not shown."""
ICON: Final = ROOT / "clients" / "sow_console" / "static" / "icon.svg"
CONTRACT: Final = "proto/sow/v1"
LANGUAGES: Final = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".sh": "sh"}
LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]+)?(?=\))")
FENCE: Final = re.compile(r"^ *(`{3,})")
ITEM: Final = re.compile(r"^(?:[-*]|[0-9]+\.) +")
CODE: Final = re.compile(r"`[^`]+`")
STATED: Final = re.compile(r"^\*\*([A-Z][0-9]+) · ([^*]+)\*\*", re.MULTILINE)
CITED: Final = re.compile(r"(?<![\w#>/.-])([ADFJKLNPQRSTX][0-9]{1,2})(?![\w-]|\.\w)")
KEPT: Final = re.compile(r"<(a|pre|code|h[1-6]|title|style|script)\b.*?</\1>|<[^>]+>", re.DOTALL)
"""Parts of a page in which nothing is a citation."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of [2] and [3], and the icon of the console, which is that of the site, too."""
    files.append(File.generated(config, "pictures/icon.svg", content=ICON.read_text(encoding="utf-8")))
    for name, text in docs_reference.pages().items():
        files.append(File.generated(config, name, content=text))
    for path in sorted(linked_files()):
        files.append(File.generated(config, shown_at(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts a page into the form for Python-Markdown [1]."""
    name = page.file.src_uri
    if name.startswith("reference/") and not (ROOT / DOCS / name).exists():
        return with_blank_lines(markdown)
    path = repository_path(name)
    if path is None:  # a page of [2] about a file that is no page itself
        return markdown
    text = with_links(markdown, path)
    if path == f"{DOCS}/rules.md":
        text = STATED.sub(lambda found: f"**{found[1]} · {found[2]}**{{ #{found[1].lower()} }}", text)
    return with_blank_lines(text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes citations of rules links [4]."""
    known = rules()
    rules_page = posixpath.relpath("rules.html", posixpath.dirname(page.file.dest_uri) or ".")

    def link(found: re.Match[str]) -> str:
        rule = found[1]
        return f'<a href="{rules_page}#{rule.lower()}">{rule}</a>' if rule in known else rule

    parts, end = [], 0
    for kept in KEPT.finditer(html):
        parts += [CITED.sub(link, html[end : kept.start()]), kept[0]]
        end = kept.end()
    return "".join([*parts, CITED.sub(link, html[end:])])


def rules() -> set[str]:
    """The ids of all rules."""
    return {found[1] for found in STATED.finditer((ROOT / DOCS / "rules.md").read_text(encoding="utf-8"))}


# -- files outside of docs --------------------------------------------------------------------------------------------


def linked_files() -> set[str]:
    """Every file and folder outside of `docs/` that a page links to, and that those pages link to, as paths from the
    root."""
    found: set[str] = set()
    unread = [path.relative_to(ROOT).as_posix() for path in (ROOT / DOCS).rglob("*.md")]
    while unread:
        page = unread.pop()
        for target in targets(page):
            if not target.startswith(f"{DOCS}/") and target not in found and target != CONTRACT:
                found.add(target)
                if target.endswith(".md"):
                    unread.append(target)
    return found


def targets(page: str) -> Iterator[str]:
    """The files and folders of the repository that a page links to, which exist."""
    for number, line in lines_outside_fences((ROOT / page).read_text(encoding="utf-8")):
        del number
        for found in LINK.finditer(line):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), found[1]))
            if (ROOT / target).exists():
                yield target


def shown_at(path: str) -> str:
    """The page of the site that shows a file or folder of the repository."""
    if path == CONTRACT:
        return "reference/index.md"
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if (ROOT / path).is_dir():
        return f"{SOURCE}/{path}/index.md"
    return f"{SOURCE}/{path}" if path.endswith(".md") else f"{SOURCE}/{path}.md"


def repository_path(name: str) -> str | None:
    """The file of the repository that is a page of the site; None: the page only shows it."""
    if not name.startswith(f"{SOURCE}/"):
        return f"{DOCS}/{name}"
    path = name.removeprefix(f"{SOURCE}/")
    return path if (ROOT / path).is_file() else None


def shown(path: str) -> str:
    """The page of a file or folder."""
    whole = ROOT / path
    if path.endswith(".md"):
        return whole.read_text(encoding="utf-8")
    if whole.is_file():
        return f"# {path}\n\n{block(whole)}"
    parts = [f"# {path}\n"]
    files = [file for file in sorted(whole.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]
    parts += [f"## {file.relative_to(whole).as_posix()}\n\n{block(file)}" for file in files]
    return "\n".join(parts)


def block(file: Path) -> str:
    """The text of a file as a block."""
    if file.stat().st_size > SHOWN_BYTES_MAX:
        return f"{file.stat().st_size:,} bytes, which are not shown here.\n"
    text = file.read_text(encoding="utf-8")
    return f"`````{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n`````\n"


# -- the form of a page -----------------------------------------------------------------------------------------------


def lines_outside_fences(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a page that are not in a fenced block, with their numbers from 0."""
    fence = ""
    for number, line in enumerate(text.split("\n")):
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and line.strip() == mark[1]:
            fence = ""
        elif not fence:
            yield number, line


def with_links(markdown: str, path: str) -> str:
    """The page with links to pages of the site, in place of files of the repository."""
    folder = posixpath.dirname(path)
    here = posixpath.dirname(shown_at(path))

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        if not (ROOT / target).exists():
            return found[0]  # MkDocs refuses it
        return posixpath.relpath(shown_at(target), here or ".") + (found[2] or "")

    lines = markdown.split("\n")
    for number, line in lines_outside_fences(markdown):
        lines[number] = LINK.sub(link, line)
    return "\n".join(lines)


def with_blank_lines(markdown: str) -> str:
    """The page with a blank line in front of each list, the parts of its items indented by four, and no backslashes in
    front of the bars in the code of tables."""
    outside = dict(lines_outside_fences(markdown))
    made: list[str] = []
    width = 0
    """The width of the marker of the list that a line is in. 0: in none."""
    for number, line in enumerate(markdown.split("\n")):
        if width and line.startswith(" " * width):  # a part of the item, whatever it is
            made.append(" " * (4 - width) + line)
            continue
        if number not in outside:
            width = 0
            made.append(line)
            continue
        marker = ITEM.match(line)
        if marker:
            if not width and made and made[-1].strip():
                made.append("")
            width = min(len(marker[0]), 4)
        elif not (line.strip() and made and made[-1].strip()):  # else a lazy continuation
            width = width if not line.strip() else 0
        made.append(CODE.sub(lambda code: code[0].replace(r"\|", "|"), line) if line.startswith("|") else line)
    return "\n".join(made)
