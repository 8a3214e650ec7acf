"""Generates the blocking client, `sow_client.blocking`, from the asynchronous one, `sow_client.aio`.

    python clients/generate_blocking.py             write the modules of sow_client/blocking
    python clients/generate_blocking.py --check     write nothing; exit 1 and name the modules that differ

Each module `_name.py` of `aio` gives the module of that name in `blocking`. Four things change: words (`_WORDS`), the
blocks under `with _transport.unless_closed():` or `unless_cut`, which only asyncio needs and whose lines move one level
out, paragraphs of docstrings that begin with "In asyncio", which are left out, and the layout, which ruff makes anew.
`unasync` would change words only: docstrings would read wrong, and blocks that only asyncio needs would stay. Both
`__init__.py` are written by hand: they say who may use the client.

The rest of `sow_client` is written by hand: pure modules that both clients use, and what threads and tasks really do
differently, in pairs whose asynchronous one has the prefix Async or Aio: Publisher, Subscription, parts of the
transport, and the small parts of `_workers`, `_flags`, `_queries`, `_live_view` and `_durable`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parent / "sow_client"
SOURCE: Final = PACKAGE / "aio"
TARGET: Final = PACKAGE / "blocking"

_NOTICE: Final = (
    "# Generated from aio/{name} by clients/generate_blocking.py. Change that file, then run `make client`.\n"
)
_ONLY_ASYNCIO: Final = re.compile(r"( *)with _transport\.unless_(?:closed|cut)\(\w*\):\n")
_ONLY_ASYNCIO_DOCS: Final = re.compile(r"\n\n +In asyncio [^\n]+(?:\n +[^\n\"]+)*(?=\n)")
_INDENT: Final = " " * 4
_WORDS: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\ban `async with`", "a `with`"),
        (r"\basync (def|for|with)\b", r"\1"),
        (r"\bawait ", ""),
        (r"\bAwaitable\[([^\[\]]+)\]", r"\1"),
        (r"\bAsyncGenerator\[(.+), None\]", r"Generator[\1, None, None]"),
        (r"\b(Async|Aio)(?=[A-Z])", ""),
        (r"\b(_?)aio_(?=[a-z])", r"\1"),
        (r"\b__a(iter|next|enter|exit)__", r"__\1__"),
        (r"\baclosing\b", "closing"),
        (r"\baclose\b", "close"),
        (r"\banext\b", "next"),
        (r"  # noqa: ASYNC109[^\n]*", ""),
        (r"\bimport asyncio\n", "import time\n"),
        (r"\basyncio\.sleep\b", "time.sleep"),
        (r"\basyncio\.to_thread\(([\w.]+)(?:, |(?=\)))", r"\1("),
        (r"\bimport grpc\.aio\n", ""),
        (r"\bgrpc\.aio\.", "grpc."),
        (r"\bin one task\b", "on one thread"),
        (r"\b([Aa]|any|one) task\b", r"\1 thread"),
        (r"\bsow_client\.aio\b", "sow_client.blocking"),
    )
)
_REMAINS: Final = re.compile(r"\b(async|await|asyncio|aio|unless_closed|unless_cut)\b")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Generate the blocking client from the asynchronous one.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a module differs")
    options = parser.parse_args(arguments)
    fresh = {path.name: blocking(path.read_text(), path.name) for path in SOURCE.glob("_[!_]*.py")}
    present = {path.name: path.read_text() for path in TARGET.glob("_[!_]*.py")}
    differing = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
    if options.check:
        for name in differing:
            print(f"differs from what its source generates: {TARGET.name}/{name}", file=sys.stderr)
        if differing:
            print("run `make client`", file=sys.stderr)
        return 1 if differing else 0
    for name in differing:
        if name in fresh:
            (TARGET / name).write_text(fresh[name])
        else:
            (TARGET / name).unlink()  # its source is gone
    print(f"{len(fresh)} modules, {len(differing)} changed")
    return 0


def blocking(source: str, name: str) -> str:
    """The blocking module of an asynchronous one. Raises ValueError for a word of asyncio that no rule replaces."""
    text = _ONLY_ASYNCIO_DOCS.sub("", _without_asyncio_blocks(source))
    for pattern, replacement in _WORDS:
        text = pattern.sub(replacement, text)
    if found := _REMAINS.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"{name}: line {line} of the generated module still says {found[0]!r}")
    text = _ruff(text, "check", "--fix-only", "--unsafe-fixes", "--select=C416,F401,I,UP028", "--quiet")
    return _NOTICE.format(name=name) + _ruff(text, "format")


def _without_asyncio_blocks(source: str) -> str:
    lines: list[str] = []
    blocks: list[int] = []  # the indents of the blocks that are open
    for line in source.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip(" "))
        while blocks and line.strip() and indent <= blocks[-1]:
            blocks.pop()
        if opened := _ONLY_ASYNCIO.fullmatch(line):
            blocks.append(len(opened[1]))
        else:
            lines.append(line[len(_INDENT) * len(blocks) :] if line.strip() else line)
    return "".join(lines)


def _ruff(text: str, *command: str) -> str:
    arguments = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET / "generated.py"), "-"]
    return subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
