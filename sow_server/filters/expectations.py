"""Says what the parser expected where the text of a filter does not fit the grammar, and what to write instead.

    [1]  Everything that the parser would accept at that place is named, in a reader's words.
    [2]  Text that is SQL, or nearly a field, gets advice. Advice follows the expectation; it never replaces it.

Pure.
"""

from __future__ import annotations

import contextlib
import re
from typing import Final

from lark.exceptions import UnexpectedInput, UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from sow_server.filters.filter_errors import FilterError

_KEYWORDS: Final = re.compile(
    r"(?:AND|OR|NOT|IN|BETWEEN|LIKE|BEGINS|ENDS|CONTAINS|IS|TRUE|FALSE|NULL)\Z", re.IGNORECASE
)
_TEXT: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_BARE_WORD: Final = re.compile(r"[^\W\d][\w.:$#-]{0,40}")


def unexpected(error: UnexpectedInput, text: str, once_more: InteractiveParser) -> FilterError:
    """The error for a text that does not fit the grammar. `once_more`: a parser at the beginning of the text."""
    position = error.pos_in_stream
    if isinstance(error, UnexpectedToken) and error.token.type == "$END":
        position = len(text)
    assert position is not None, "an unexpected token has a position"
    found = text[position : position + 1]
    # Parse again to ask the parser for everything it would accept: the error knows only some of it.
    with contextlib.suppress(UnexpectedInput):
        once_more.exhaust_lexer()
    accepted: set[str] = once_more.accepts()  # type: ignore[no-untyped-call]  # lark's annotations are incomplete
    if found in ("'", '"') and not _TEXT.match(text, position):
        return FilterError("expected the end of a text; its quote is never closed", position, text)
    what = f"expected {_expected(accepted)}"
    word = _BARE_WORD.match(text, position)
    advice = _of_sql(text, position)
    if advice:
        what += f"; {advice}"
    elif "PATH" in accepted and word and not _KEYWORDS.match(word[0]):
        if text[position - 1 : position] == "-":
            what += "; a name with a hyphen is put in brackets: /[a-b]"
        else:
            inner = f", one inside another /{word[0].replace('.', '/')}" if "." in word[0] else ""
            what += f"; a field is written /{word[0]}{inner}, a text '{word[0]}'"
    return FilterError(what, position, text)


_SQL: Final = (
    (
        r"(?:SELECT|WITH)\b",
        "a filter is no SQL: write only the condition, as it stands after WHERE, with fields as /name",
    ),
    (
        r"(?:DELETE|UPDATE|INSERT)\b",
        "a filter is no SQL: it is only a condition, with fields as /name; the call says what becomes of the records",
    ),
    (r"WHERE\b", "a filter is the condition alone: leave out WHERE, and write fields as /name"),
    (
        r"(?:LIMIT|TOP|FETCH|OFFSET)\b",
        "a filter does not say how many records: that is top_n and skip_n, in the command --top and --skip",
    ),
    (r"ORDER\s+BY\b", "a filter does not say the order: that is order_by, in the command --order-by"),
    (
        r"(?:GROUP\s+BY|HAVING)\b",
        "a filter groups nothing: that is group_by and having, in the command --group-by and --having",
    ),
    (r"(?:I|R)LIKE\b", "LIKE takes a regular expression, LIKE '(?i)abc' in upper or lower case"),
    (r"(?:REGEXP|SIMILAR)\b|=?~", "a regular expression is written LIKE 'pattern'"),
    (r"(?:NOTNULL|ISNULL|(?<=NOT )NULL)\b", "write IS NULL or IS NOT NULL"),
    (r"EXISTS\b", "write /field IS NOT NULL"),
    (r"CASE\b", "write IF(condition, x, y)"),
    (r"(?:AS|FROM|JOIN|UNION)\b", "a filter is no SQL, only a condition with fields as /name"),
    (r";|--|(?<=--)|(?<=-- )|/\*", "a filter is one condition, without ; and comments"),
    (r"\?|%[(s]|\$[\w{]|:\d", "a parameter is written :name, and its value is given by this name"),
    (r"[`\\]", "a field is written /name, and one with other characters /[odd name]"),
)
"""Beginnings of texts in SQL, and what to write here instead."""
_NO_FIELD: Final = r"(?!\s*(?:[=<>!]|(?:IN|LIKE|IS|NOT|BETWEEN|BEGINS|ENDS|CONTAINS)\b))"
"""A word before an operator is a field without its slash, also one that SQL knows."""
_SQL_WORDS: Final = tuple([(re.compile(f"(?:{text}){_NO_FIELD}", re.IGNORECASE), advice) for text, advice in _SQL])


def _of_sql(text: str, position: int) -> str:
    """Advice where the text goes on in SQL; empty: it does not."""
    return next((advice for beginning, advice in _SQL_WORDS if beginning.match(text, position)), "")


def _expected(accepted: set[str]) -> str:
    """The tokens that the parser would accept, in a reader's words."""
    if "PATH" in accepted:
        choices = ["a value"]
    elif "NUMBER" in accepted:
        choices = ["a literal"] if "TEXT" in accepted else ["a number"]
    elif "IN" in accepted:
        choices = ["an operator" if "COMPARISON" in accepted else "IN, LIKE, BETWEEN, BEGINS WITH, ENDS WITH, CONTAINS"]
    elif "TEXT" in accepted:
        choices = ["a text"]
    elif "NULL" in accepted:
        choices = ["NULL", "NOT NULL"] if "NOT" in accepted else ["NULL"]
    elif "LPAR" in accepted:
        choices = ["'('"]
    else:
        choices = []
    if "AND" in accepted:
        choices += ["AND", "OR"] if "OR" in accepted else ["AND"]
    if "_COMMA" in accepted:
        choices.append("','")
    if "RPAR" in accepted:
        choices.append("')'")
    if "$END" in accepted:
        choices.append("the end")
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
