"""Resolves every citation of a rule and of a module's invariant, in code, tests and docs.

[1]  A rule has a letter id (L8). Only docs/rules.md states rules, each once; every letter id elsewhere cites one.
[2]  A module numbers its own invariants in its docstring, in lines such as this one. Inside the module they are
     cited by number alone. Elsewhere the module's name stands before the number. Where several modules of one name
     have invariants, their folder stands before the name.
[3]  Comments, docstrings, pages and contracts are read. Other strings may hold anything: only the words "rule" and
     "rules" make the ids behind them citations.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.tree import Finding, other_files, python_files

RULES = "docs/rules.md"
# Words that look like letter ids and are none.
WORDS = frozenset({"CC0", "RE2"})

_STATED_RULE = re.compile(r"^\*\*([A-Z]\d+) · ", re.MULTILINE)
_LETTERS = r"[A-Z]{1,3}\d{1,2}|[A-Z]{1,2}-[a-z]"
_LETTER_ID = re.compile(rf"(?<![\w.\-/'\"=@$&{{\[])({_LETTERS})(?![\w'\"=\]}}]|-\w|\.\d)")
_LETTER_DEFINITION = re.compile(rf"^[ \t]*({_LETTERS}) {{1,4}}\S", re.MULTILINE)
_AFTER_RULE = re.compile(r"\brules? ([A-Z]\d+(?:(?:,| and| to| or|, and) [A-Z]\d+)*)")
_STATED_NUMBER = re.compile(r"^[ \t]*\[(\d{1,2})\]  \S", re.MULTILINE)
_NUMBERS = re.compile(
    r"(?<![^\s(`])"
    r"(?:(?P<module>[a-z_]\w*(?:/[a-z_]\w*)*)`?\s+)?"
    r"(?P<numbers>\[\d{1,2}\](?:(?:,| and| to| or|, and)\s+\[\d{1,2}\])*)"
    r"(?![\[(:\w])"
)
_CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")


class Prose(NamedTuple):
    """Text for readers, and the line of its file that it begins in."""

    line: int
    text: str

    def line_of(self, position: int) -> int:
        return self.line + self.text.count("\n", 0, position)


@dataclass(frozen=True, slots=True)
class Module:
    path: str
    docstring: Prose
    prose: tuple[Prose, ...]  # the docstring, too
    strings: tuple[Prose, ...]
    stated: Counter[int]

    @property
    def name(self) -> str:
        """The path without its suffix; a package is named as its folder."""
        return self.path.removesuffix(".py").removesuffix("/__init__")


def findings(root: Path) -> list[Finding]:
    stated = Counter(_STATED_RULE.findall((root / RULES).read_text(encoding="utf-8")))
    found = [Finding(RULES, 1, f"{rule} is stated {count} times") for rule, count in stated.items() if count > 1]
    rules = frozenset(stated)
    modules = [_module(root, file) for file in python_files(root)]
    for module in modules:
        found += _wrong_definitions(module)
        for prose in module.prose:
            found += _unknown_rules(module.path, prose, rules)
            found += _unknown_numbers(module.path, prose, module, modules)
        for string in module.strings:
            found += _unknown_rules_of_string(module.path, string, rules)
    for file in other_files(root):
        path = file.relative_to(root).as_posix()
        for prose in _prose_of_page(file):
            found += _unknown_rules(path, prose, rules)
            found += _unknown_numbers(path, prose, None, modules)
    return sorted(found)


def _wrong_definitions(module: Module) -> Iterator[Finding]:
    for number, count in module.stated.items():
        if count > 1:
            yield Finding(module.path, module.docstring.line, f"[{number}] is stated {count} times")
    for match in _LETTER_DEFINITION.finditer(module.docstring.text):
        if match.start() and match[1] not in WORDS:
            line = module.docstring.line_of(match.start(1))
            yield Finding(module.path, line, f"{match[1]} begins a line: letter ids are defined in {RULES} alone")


def _unknown_rules(path: str, prose: Prose, rules: frozenset[str]) -> Iterator[Finding]:
    without_code = _CODE.sub(lambda code: " " * len(code[0]), prose.text)
    for match in _LETTER_ID.finditer(without_code):
        if match[1] not in rules and match[1] not in WORDS:
            yield Finding(path, prose.line_of(match.start(1)), f"{match[1]} is no rule of {RULES}")


def _unknown_rules_of_string(path: str, string: Prose, rules: frozenset[str]) -> Iterator[Finding]:
    for match in _AFTER_RULE.finditer(string.text):
        for rule in re.findall(r"[A-Z]\d+", match[1]):
            if rule not in rules:
                yield Finding(path, string.line, f"{rule} is no rule of {RULES}")


def _unknown_numbers(path: str, prose: Prose, own: Module | None, modules: list[Module]) -> Iterator[Finding]:
    definitions = {match.start(1) - 1 for match in _STATED_NUMBER.finditer(prose.text)}
    for match in _NUMBERS.finditer(prose.text):
        if match.start("numbers") in definitions:
            continue
        line = prose.line_of(match.start("numbers"))
        cited = _module_cited(match["module"], own, modules)
        if isinstance(cited, str):
            yield Finding(path, line, f"{' '.join(match['numbers'].split())} {cited}")
            continue
        for number in re.findall(r"\d+", match["numbers"]):
            if int(number) not in cited.stated:
                yield Finding(path, line, f"[{number}] is not stated in {cited.path}")


def _module_cited(name: str | None, own: Module | None, modules: list[Module]) -> Module | str:
    """The module whose invariants a citation means, or the reason why that is not clear. A word before the number that
    is no module's name belongs to the sentence."""
    named = [module for module in modules if name is not None and f"/{module.name}".endswith(f"/{name}")]
    if not named:
        return own if own is not None else "names no module"
    numbered = [module for module in named if module.stated]
    if len(numbered) > 1:
        return f"of {name} may be of {' or '.join(module.name for module in numbered)}"
    return (numbered or named)[0]


def _module(root: Path, file: Path) -> Module:
    source = file.read_text(encoding="utf-8")
    docstrings: list[Prose] = []
    strings: list[Prose] = []
    tree = ast.parse(source)
    read = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.append(Prose(node.lineno, node.value.value))
            read.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in read:
            strings.append(Prose(node.lineno, node.value))
    docstring = Prose(1, ast.get_docstring(tree, clean=False) or "")
    stated = Counter(int(number) for number in _STATED_NUMBER.findall(docstring.text))
    prose = (*docstrings, *_comments(source))
    return Module(file.relative_to(root).as_posix(), docstring, prose, tuple(strings), stated)


def _comments(source: str) -> Iterator[Prose]:
    """Comments, those of adjacent lines as one text."""
    begin, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != begin + len(lines):
                yield Prose(begin, "\n".join(lines))
                lines = []
            if not lines:
                begin = token.start[0]
            lines.append(token.string.lstrip("#:"))
    if lines:
        yield Prose(begin, "\n".join(lines))


def _prose_of_page(file: Path) -> Iterator[Prose]:
    text = file.read_text(encoding="utf-8")
    match file.suffix:
        case ".md":
            yield Prose(1, _CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text))
        case ".patch":
            yield Prose(1, text.partition("\n\n")[0])
        case ".proto":
            yield Prose(1, "\n".join(line.partition("//")[2] for line in text.splitlines()))
        case _:
            yield Prose(1, "\n".join(line.partition("# ")[2] for line in text.splitlines()))
