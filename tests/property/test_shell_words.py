"""Words of the interactive shell are those of a POSIX shell, wherever a line has no operators and no documents."""

from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st

from sow_cli.shell_lines import LineError, commands, goes_on, tokens

TEXTS = st.text(st.sampled_from("ab/=(1 \t'\"\\é\u00a0"), max_size=14)


@given(TEXTS)
def test_words_are_those_of_shlex(text: str) -> None:
    try:
        expected = shlex.split(text)
    except ValueError:
        assert goes_on(text)
        return
    assert not goes_on(text)
    found = list(tokens(text))
    assert [one.text for one in found] == expected
    assert all(text[one.start : one.end].strip(" \t") and shlex.split(text[one.start : one.end]) for one in found)


@given(st.lists(st.text(max_size=6), min_size=1, max_size=4), st.sampled_from(["|", ";", ">", ">>"]))
def test_words_in_quotation_marks_have_no_operators(words: list[str], operator: str) -> None:
    """A filter such as "/a > 9" is one word, whatever it has."""
    words = ["count", *words]
    if words[-1] == "\\G":
        return
    (found,) = commands(shlex.join(words))
    assert found.words == tuple(words)
    assert not found.program
    assert not found.file
    first = commands(f"{shlex.join(words)} {operator} 'out'")[0]
    assert first.words == tuple(words)
    assert (first.file or first.program.strip("'") or "out") == "out"


@given(st.text(st.sampled_from("ab/ '\"\\;|><{}[],.9\n"), max_size=16).filter(lambda text: text.lstrip()[:1] != "."))
def test_any_line_is_read_or_has_a_fault_with_a_position(text: str) -> None:
    try:
        found = commands(text)
    except LineError as error:
        position = error.position
    else:
        assert not goes_on(text)
        assert all(one.words for one in found)
        return
    assert 0 <= position <= len(text)
