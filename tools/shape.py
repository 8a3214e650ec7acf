"""Checks the shape of the code: `python -m tools.shape [CHECK…] [--report]`.

    [1]  `circles`: no files of a package import each other in a circle. Imports for type checkers count as well.
    [2]  `sizes`: a module has at most 600 lines (one of tests 700), a function at most 70, a class outside of tests at
         most 32 methods. The constructor of a class of the server or of replication has at most 8 parameters, and other
         functions take at most 8 arguments by position. Generated files may be larger. (ruff bounds the complexity.)
         There are no exceptions: the part that is too much has a name of its own.
    [3]  `ids`: every citation of a rule and of an invariant resolves (`tools.ids`).

Without a CHECK it makes all of them. It prints findings as `file:line: text` and exits with 1 when there is one;
with --report it exits with 0 all the same.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import grimp

from tools import ids
from tools.tree import PACKAGES, Finding, Package, python_files

MOST: Final = {"module lines": 600, "lines": 70, "methods": 32, "constructor parameters": 8, "positional parameters": 8}
"""The bounds, by what is counted."""
TEST_MODULE_LINES: Final = 700
"""A module of tests is read test by test."""
RUNNING: Final = ("sow_server/", "replication/")
"""A server runs these. The constructors of its clients have options, which users name."""
TESTS: Final = "tests/"

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def circles(root: Path) -> list[Finding]:
    """Each circle of files, once, at the first of its files."""
    found = []
    for package in PACKAGES:
        if (root / package.path / "__init__.py").exists():
            for circle in _circles(_imports(root, package)):
                path = f"{package.folder}/{circle[0].replace('.', '/')}".removeprefix("/")
                file = f"{path}/__init__.py" if (root / path).is_dir() else f"{path}.py"
                found.append(Finding(file, 1, f"imports in a circle: {', '.join(circle)}"))
    return found


class Size(NamedTuple):
    """A size in a file. `name`: of the class or function; empty for the module."""

    line: int
    name: str
    measured: int
    what: str


def sizes(root: Path) -> list[Finding]:
    """Sizes above the bounds."""
    found: list[Finding] = []
    for file in python_files(root):
        source = file.read_text(encoding="utf-8")
        path = file.relative_to(root).as_posix()
        bounds = MOST | {"module lines": TEST_MODULE_LINES} if path.startswith(TESTS) else MOST
        module = Size(1, "", source.count("\n"), "module lines")
        for size in (module, *_sizes(ast.parse(source), "", running=path.startswith(RUNNING))):
            if size.what == "methods" and path.startswith(TESTS):
                continue
            if size.measured > (most := bounds[size.what]):
                text = f"{size.name}: {size.measured} {size.what}, {most} at most".removeprefix(": ")
                found.append(Finding(path, size.line, text))
    return sorted(found)


CHECKS: Mapping[str, Callable[[Path], list[Finding]]] = {"circles": circles, "sizes": sizes, "ids": ids.findings}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.shape", description="Checks the shape of the code.")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--report", action="store_true", help="exit with 0 whatever is found")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the project's folder")
    options = parser.parse_args(arguments)
    if unknown := set(options.checks) - CHECKS.keys():
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    found = [finding for check in options.checks or CHECKS for finding in CHECKS[check](options.root)]
    for finding in found:
        print(finding)
    print(f"{len(found)} findings", file=sys.stderr)
    return 1 if found and not options.report else 0


def _sizes(node: ast.AST, within: str, *, running: bool) -> Iterator[Size]:
    """The sizes of the classes and functions in a node; `within`: the name in front of theirs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            name = f"{within}{child.name}"
            yield Size(child.lineno, name, sum(isinstance(one, _Function) for one in child.body), "methods")
            yield from _sizes(child, f"{name}.", running=running)
        elif isinstance(child, _Function):
            name = f"{within}{child.name}"
            assert child.end_lineno is not None, "the parser sets it"
            yield Size(child.lineno, name, child.end_lineno - child.lineno + 1, "lines")
            is_constructor = running and child.name == "__init__"
            yield Size(child.lineno, name, _parameters(child, all_kinds=is_constructor), _KINDS[is_constructor])
            yield from _sizes(child, f"{name}.", running=running)
        else:
            yield from _sizes(child, within, running=running)


_KINDS: Final = {False: "positional parameters", True: "constructor parameters"}


def _parameters(function: _Function, *, all_kinds: bool) -> int:
    """Without `self`; keyword-only ones count for `all_kinds`."""
    named = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    positional = len(named) - (named[:1] in (["self"], ["cls"]))
    return positional + len(function.args.kwonlyargs) * all_kinds


def _imports(root: Path, package: Package) -> dict[str, set[str]]:
    folder = str(root / package.folder)
    sys.path.insert(0, folder)  # grimp finds packages as Python does
    try:
        graph = grimp.build_graph(package.name, cache_dir=None)
    finally:
        sys.path.remove(folder)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def _circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other, by name."""
    reached = {module: _reached(imports, module) for module in imports}
    groups = {tuple(sorted(other for other in reached[module] if module in reached[other])) for module in imports}
    return sorted(list(group) for group in groups if group)


def _reached(imports: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for module in imports[waiting.pop()] - reached:
            reached.add(module)
            waiting.append(module)
    return reached


if __name__ == "__main__":
    sys.exit(main())
