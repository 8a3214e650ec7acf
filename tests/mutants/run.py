"""Plants each mistake of this folder in a copy of the tree, and holds that the tests find it: `make mutants`.

    python -m tests.mutants.run                      # all of them, each with the tests that its patch names
    python -m tests.mutants.run --only clock-turns-back
    python -m tests.mutants.run --all                # each with the whole default suite; hours

A mistake is a patch, with its description in front:

    Mistake: the cut-off of retention keeps the entry that is exactly at it.
    Layer: journal
    Breaks: J4
    Caught by: tests/unit/durables/test_durable_retention.py::test_…
    Caught by: …                                     # one a line; one of them that fails is enough
    Hangs: yes                                       # only where a run without an end counts as caught

    --- a/sow_server/…                               # in the form that `git apply` takes

    [1]  The tests run on the copy, in their own process and in the servers that they start: `test_this_tree_runs.py`
         runs in front of them, and a mistake whose copy fails at that is reported as broken.
    [2]  Caught is what makes a test fail. A patch that does not apply, a test that is not there, a module that cannot
         be imported and a run without an end are no catch.
    [3]  The named tests pass on the tree as it is; they run there once, before anything is planted.
"""

from __future__ import annotations

import argparse
import enum
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = Path(__file__).parent
SOURCES: Final = (".", "proto", "clients", "replication", "spark_connector")
"""The source roots, as in `pyproject.toml`."""
CHECK: Final = "tests/mutants/test_this_tree_runs.py"
AT_ONCE: Final = 2
SECONDS_MAX: Final = 600
"""For the named tests of one mistake. They take seconds."""
ALL_SECONDS_MAX: Final = 3600
TESTS_FAILED: Final = 1
"""pytest's exit code; 0 is that all passed, every other one is no judgement."""


class BadPatch(Exception):
    """A fault of a patch."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted mistake."""

    name: str
    path: Path
    mistake: str
    layer: str
    breaks: str
    tests: tuple[str, ...]
    hangs: bool


class Verdict(enum.StrEnum):
    """The outcome for a planted mistake."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    STALE = "STALE"
    """Its patch does not apply any more."""
    BROKEN = "BROKEN"
    """The tests could not judge it."""


class Result(NamedTuple):
    """A verdict, and its reason: the name of the test that failed, or the fault."""

    mutant: Mutant
    verdict: Verdict
    why: str
    seconds: float


def read(path: Path) -> Mutant:
    """Reads the description of a patch. Raises BadPatch."""
    head, found, _ = path.read_text().partition("\n--- ")
    if not found:
        raise BadPatch(f"{path.name}: there is no patch in it")
    fields: dict[str, list[str]] = {}
    for line in filter(None, head.splitlines()):
        name, found, value = line.partition(": ")
        if not found or name not in ("Mistake", "Layer", "Breaks", "Caught by", "Hangs"):
            raise BadPatch(f"{path.name}: {line!r} is none of the lines of a description")
        fields.setdefault(name, []).append(value.strip())
    for name in ("Mistake", "Layer", "Breaks", "Caught by"):
        if name not in fields:
            raise BadPatch(f"{path.name}: the line {name!r} is missing")
    return Mutant(
        path.stem,
        path,
        " ".join(fields["Mistake"]),
        fields["Layer"][0],
        fields["Breaks"][0],
        tuple(fields["Caught by"]),
        fields.get("Hangs") == ["yes"],
    )


def read_all(folder: Path = FOLDER) -> list[Mutant]:
    """All mistakes, by name. Raises BadPatch."""
    return [read(path) for path in sorted(folder.glob("*.patch"))]


# -- copies ---------------------------------------------------------------------------------------------------------


def copy_tree(copied: Path) -> None:
    """Copies the tree as it is: with changes that are not committed, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, copied / name
        if source.is_file():  # not a file that is removed, and not yet committed
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def plant(mutant: Mutant, tree: Path) -> None:
    """Plants a mistake. Raises BadPatch where its patch does not apply."""
    done = subprocess.run(["git", "apply", str(mutant.path)], cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadPatch(f"the patch does not apply any more: {done.stderr.strip().splitlines()[0]}")


# -- tests ----------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """The result of pytest. `code` None: it took too long."""

    code: int | None
    failed: list[str]
    said: str


def run_tests(tree: Path, arguments: Sequence[str], seconds_max: float) -> Run:
    """Runs tests of a tree with this Python, so that they import that tree and nothing that is installed of ours."""
    paths = [str(tree / source) for source in SOURCES]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment.setdefault("SOW_TEST_SEED", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "--no-header", "--tb=short", "-m", "not long", *arguments],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that the servers of a run that hangs end with it
    )
    try:
        said, _ = process.communicate(timeout=seconds_max)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        code = None
    return Run(code, re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE), said)


def judge(mutant: Mutant, template: Path, *, everything: bool) -> Result:
    """Plants a mistake in a copy of `template`, and runs the tests there."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"mutant-{mutant.name}-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(template, tree)  # with its bytecode: unchanged files need not be compiled again
        verdict, why = _judged(mutant, tree, everything=everything)
    return Result(mutant, verdict, why, time.monotonic() - started)


def _judged(mutant: Mutant, tree: Path, *, everything: bool) -> tuple[Verdict, str]:
    try:
        plant(mutant, tree)
    except BadPatch as error:
        return Verdict.STALE, str(error)
    tests = ["tests"] if everything else list(mutant.tests)
    run = run_tests(tree, ["-x", CHECK, *tests], ALL_SECONDS_MAX if everything else SECONDS_MAX)
    if any(test.startswith(CHECK) for test in run.failed):
        return Verdict.BROKEN, "another tree than the copy ran"
    if run.code is None:
        return (Verdict.CAUGHT, "it hangs") if mutant.hangs else (Verdict.BROKEN, "the tests do not end")
    if run.code == TESTS_FAILED and run.failed:
        return Verdict.CAUGHT, run.failed[0].partition("[")[0].rpartition("::")[2]
    if run.code == 0:
        return Verdict.SURVIVED, "all tests passed"
    return Verdict.BROKEN, f"pytest ended with exit code {run.code}: {run.said.strip().splitlines()[-1:]}"


# -- the program ----------------------------------------------------------------------------------------------------


def table(results: Iterable[Result]) -> str:
    """One line each."""
    rows = [
        (
            result.mutant.name,
            result.mutant.layer,
            result.mutant.breaks,
            result.verdict.value,
            result.seconds,
            result.why,
        )
        for result in results
    ]
    widths = [max((len(str(row[column])) for row in rows), default=0) for column in range(4)]
    return "\n".join(
        "  ".join([*(str(row[column]).ljust(widths[column]) for column in range(4)), f"{row[4]:5.0f} s", row[5]])
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 when every mistake was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description="Plants mistakes; see the module.")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="this mistake alone; may be repeated"
    )
    parser.add_argument("--all", action="store_true", help="run the whole default suite for each one")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        template = Path(folder) / "tree"
        copy_tree(template)
        try:
            # Those of the copy: the tree may be edited meanwhile.
            found = read_all(template / FOLDER.relative_to(ROOT))
        except BadPatch as error:
            return _end(str(error))
        mutants = [mutant for mutant in found if not chosen.only or mutant.name in chosen.only]
        if missing := set(chosen.only) - {mutant.name for mutant in mutants}:
            return _end(f"there is no mistake {', '.join(sorted(missing))}")
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        print(f"the {len(tests)} named tests, with nothing planted …", flush=True)
        clean = run_tests(template, [CHECK, *tests], ALL_SECONDS_MAX)
        if clean.code != 0:
            return _end(f"{clean.said}\nthe named tests do not pass on the tree as it is ([3])")
        results: list[Result] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for result in pool.map(lambda mutant: judge(mutant, template, everything=chosen.all), mutants):
                print(table([result]), flush=True)
                results.append(result)
    caught = sum(result.verdict is Verdict.CAUGHT for result in results)
    print(f"\n{table(results)}\n\n{caught} of {len(results)} are caught")
    return 0 if caught == len(results) else 1


def _end(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
