"""Pages and help texts are written in short sentences, and docstrings in sentences that have a subject.

Paragraphs and list items count. Blocks of code, tables, headings and comments do not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

import pytest

from tools import docs_command

DOCS: Final = Path(__file__).parents[3] / "docs"
MEDIAN_MAX: Final = 16
WORDS_MAX: Final = 35
"""Words of a sentence."""

PAGES: Final = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

FENCE: Final = re.compile(r" *(```+|~~~+)")
COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
NO_TEXT: Final = re.compile(r" *(#|\||</?[a-z]|---+$|$)")
INDENTED: Final = "    "
"""So begins a line of code where no paragraph comes before it."""
ITEM: Final = re.compile(r" *(?:[-*]|\d+\.) +")
LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
CODE: Final = re.compile(r"(`+)[^`].*?\1")
END: Final = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)[)\"*_]*\s+")


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Each paragraph and list item as one line of text, with the line of the page in which it begins."""
    begun, text, fence = 0, "", ""
    lines = COMMENT.sub(lambda found: "\n" * found[0].count("\n"), page).splitlines()
    for number, line in enumerate([*lines, ""], 1):
        edge = FENCE.match(line)
        if fence:
            fence = "" if edge and edge[1].startswith(fence) else fence
            continue
        item = ITEM.match(line)
        if text and (edge or item or NO_TEXT.match(line)):
            yield begun, text
            text = ""
        if edge:
            fence = edge[1]
        elif text:
            text += " " + line.strip()
        elif not NO_TEXT.match(line) and (item or not line.startswith(INDENTED)):
            begun, text = number, line[item.end() if item else 0 :].strip()


def sentences(paragraph: str) -> list[str]:
    return [sentence for sentence in END.split(paragraph) if sentence]


def words(sentence: str) -> int:
    """A piece of code counts as one word, and a link as its text."""
    plain = CODE.sub("code", LINK.sub(r"\1", sentence))
    return sum(any(letter.isalnum() for letter in word) for word in plain.split())


def faults(page: str) -> list[str]:
    counted = [(words(one), line, one) for line, text in paragraphs(page) for one in sentences(text)]
    found = [f"line {line}: {count} words: {one}" for count, line, one in counted if count > WORDS_MAX]
    if counted and (middle := median(count for count, _, _ in counted)) > MEDIAN_MAX:
        found.append(f"the median sentence has {middle:g} words")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_sentences_of_a_page_are_short(page: str) -> None:
    found = faults((DOCS / page).read_text(encoding="utf-8"))
    assert found == [], f"split these sentences (at most {WORDS_MAX} words; median at most {MEDIAN_MAX})"


@pytest.mark.parametrize(("page", "text"), docs_command.command().items(), ids=list(docs_command.command()))
def test_the_sentences_of_the_help_texts_are_short(page: str, text: str) -> None:
    assert faults(text) == []


def test_only_text_counts() -> None:
    long = "word " * (WORDS_MAX + 1)
    for block in ("# {}", "| {} |", "```\n{}\n```", "    {}", "<!-- {} -->", "Short `{}`.", "Short [text]({})."):
        assert faults(f"Before.\n\n{block.format(long)}\n\nAfter.\n") == []


@pytest.mark.parametrize(
    "form", ["{}.", "- An item.\n- {}.", "1. {}.", "Before. {}\nand on.", "**{}.** After.", "- item\n\n  {}."]
)
def test_a_long_sentence_is_found_with_its_line(form: str) -> None:
    long = "word " * WORDS_MAX + "word"
    before, _, _ = form.partition("{}")
    (fault,) = [one for one in faults(form.format(long) + "\n\nShort one.\n\n" * 9) if "median" not in one]
    assert fault.startswith(f"line {before.count(chr(10)) + 1}: {WORDS_MAX + 1 + 2 * ('and on' in form)} words")


def test_long_sentences_on_the_whole_are_found() -> None:
    assert faults("word " * (MEDIAN_MAX + 1) + ".") == [f"the median sentence has {MEDIAN_MAX + 1} words"]
    assert faults("word " * MEDIAN_MAX + ".") == []


def test_the_glossary_has_each_word_once_and_in_order() -> None:
    parts = (DOCS / "glossary.md").read_text(encoding="utf-8").split("\n## ")[1:]
    words = [
        [word.strip("`").lower() for word in re.findall(r"^- \*\*(.+?)\*\*: ", part, re.MULTILINE)] for part in parts
    ]
    assert all(words)
    assert [sorted(part) for part in words] == words
    every = [word for part in words for word in part]
    assert len(every) == len(set(every))


# ---- docstrings ----

ROOT: Final = DOCS.parent
FRAGMENTS: Final = ("Of", "By", "Whether", "What", "Who")
"""A docstring that begins with one of these words has no subject."""
BEGINS_WITH_FRAGMENT: Final = re.compile(rf"""["'][\s\\]*(?:{"|".join(FRAGMENTS)})\s""")
"""A literal that does, whether it is a docstring or not."""
PACKAGES: Final = (
    "benchmarks",
    "clients/sow_cli",
    "clients/sow_client",
    "clients/sow_console",
    "clients/sow_pytest",
    "clients/sow_http",
    "examples",
    "proto",
    "replication",
    "sow_server",
    "spark_connector",
    "tools",
)


def docstrings(module: ast.Module) -> Iterator[str]:
    """The texts that are statements by themselves: of modules, classes and functions, and below assignments."""
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip()


def fragments(program: str) -> int:
    if not BEGINS_WITH_FRAGMENT.search(program):  # to parse all programs takes seconds
        return 0
    return sum(text.split(maxsplit=1)[:1] in ([word] for word in FRAGMENTS) for text in docstrings(ast.parse(program)))


@pytest.mark.slow
def test_docstrings_are_sentences() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    counts = {path.relative_to(ROOT).as_posix(): fragments(path.read_text(encoding="utf-8")) for path in paths}
    found = {path: count for path, count in counts.items() if count}
    assert found == {}, f"docstrings need a subject, and do not begin with {', '.join(FRAGMENTS)}"


@pytest.mark.parametrize(
    ("program", "count"),
    [
        ('"""Of a module."""', 1),
        ('def f() -> bool:\n    """Whether it is."""', 1),
        ('class C:\n    a: int\n    """By name."""\n    b: int\n    """Of it."""', 2),
        ('class C:\n    def __init__(self) -> None:\n        self.a = 1\n        """By name."""', 1),
        ('"""The key of a record."""\nx = "Of a text"\nf = lambda: "By"', 0),
        ('"""Whether-free."""\nif x:\n    pass\n""', 0),
    ],
)
def test_docstrings_without_a_subject_are_counted(program: str, count: int) -> None:
    assert fragments(program) == count
