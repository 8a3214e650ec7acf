"""Checks the shape of the code: `python -m tools.shape [CHECK…] [--report]`.

    [1]  `circles`: no files of a package import each other in a circle. Imports for type checkers count as well.
    [2]  `sizes`: a module has at most 700 lines, a function at most 80, a class of the server at most 40 methods, and a
         function takes at most 8 arguments by position. Generated files may be larger. (ruff bounds the
         complexity.)
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

import grimp

from tools import ids
from tools.tree import PACKAGES, Finding, Package, python_files

MODULE_LINES_MAX = 700
FUNCTION_LINES_MAX = 80
SERVER_CLASS_METHODS_MAX = 40
POSITIONAL_PARAMETERS_MAX = 8
SERVER = "sow_server/"

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


def sizes(root: Path) -> list[Finding]:
    found = []
    for file in python_files(root):
        source = file.read_text(encoding="utf-8")
        path = file.relative_to(root).as_posix()
        lines = source.count("\n")
        if lines > MODULE_LINES_MAX:
            found.append(Finding(path, 1, f"{lines} lines, {MODULE_LINES_MAX} at most"))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and path.startswith(SERVER):
                methods = sum(isinstance(member, _Function) for member in node.body)
                if methods > SERVER_CLASS_METHODS_MAX:
                    text = f"{node.name} has {methods} methods, {SERVER_CLASS_METHODS_MAX} at most"
                    found.append(Finding(path, node.lineno, text))
            elif isinstance(node, _Function):
                found += (Finding(path, node.lineno, f"{node.name} {fault}") for fault in _faults(node))
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


def _faults(function: _Function) -> Iterator[str]:
    assert function.end_lineno is not None, "the parser sets it"
    lines = function.end_lineno - function.lineno + 1
    if lines > FUNCTION_LINES_MAX:
        yield f"has {lines} lines, {FUNCTION_LINES_MAX} at most"
    named = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    positional = len(named) - (named[:1] in (["self"], ["cls"]))
    if positional > POSITIONAL_PARAMETERS_MAX:
        yield f"takes {positional} arguments by position, {POSITIONAL_PARAMETERS_MAX} at most"


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
