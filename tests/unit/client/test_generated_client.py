"""The generator of the blocking client."""

from __future__ import annotations

import pytest

from generate_blocking import SOURCE, TARGET, blocking


def test_the_blocking_client_equals_the_generated_code() -> None:
    names = {path.name for path in SOURCE.glob("_[!_]*.py")}
    assert names == {path.name for path in TARGET.glob("_[!_]*.py")}
    name = "_calls.py"  # `make check` compares all of them
    assert blocking((SOURCE / name).read_text(), name) == (TARGET / name).read_text()


def test_blocks_that_only_asyncio_needs_are_taken_out_and_their_lines_move() -> None:
    source = """async def read(self) -> AsyncIterator[int]:
    try:
        with _transport.unless_closed():
            async for one in call:
                if one:
                    # the empty line

                    yield one
        await asyncio.sleep(1)
    finally:
        pass
"""
    assert (
        blocking(source, "_x.py").partition("\n")[2]
        == """def read(self) -> Iterator[int]:
    try:
        for one in call:
            if one:
                # the empty line

                yield one
        time.sleep(1)
    finally:
        pass
"""
    )


def test_words_about_tasks_are_about_threads_and_those_of_asyncio_alone_are_left_out() -> None:
    source = '''class AsyncReader:
    """Reads in a task of its own, until the end of an `async with` block.

    In asyncio it has to be
    opened first.

    Rule: Q1.
    """

    def __init__(self, opened: Callable[[], Awaitable[int | None]]) -> None:
        """Is used in one task.

        In asyncio it may be made before the loop.
        """

    async def read(self) -> bytes:
        with _transport.unless_cut(_WHAT):
            return await asyncio.to_thread(self._parts.joined, b"")
'''
    assert (
        blocking(source, "_x.py").partition("\n")[2]
        == '''class Reader:
    """Reads in a thread of its own, until the end of a `with` block.

    Rule: Q1.
    """

    def __init__(self, opened: Callable[[], int | None]) -> None:
        """Is used on one thread."""

    def read(self) -> bytes:
        return self._parts.joined(b"")
'''
    )


def test_a_word_of_asyncio_without_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"_x\.py: line 2 .* 'asyncio'"):
        blocking("async def wait() -> None:\n    await asyncio.wait([])\n", "_x.py")
