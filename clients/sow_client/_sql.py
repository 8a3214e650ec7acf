"""Texts of SQL: the topics that one reads, the columns that it needs, and conditions that the server can judge. Pure.

sqlglot parses the text, and DuckDB runs it as it stands: nothing is written anew.

    [1]  One SELECT is let through, over topics alone. DuckDB is closed besides (_sql_database [1]).
    [2]  A pushed filter keeps every record that DuckDB's conditions keep, also where DuckDB compares a text with a
         number in its own way. DuckDB judges the records that were read once more.
    [3]  A filter is written with names for its values, which are those of the text or of its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec

from sow_client._frames import library
from sow_client._records import invalid
from sow_client.errors import InvalidArgument

SqlParameters: TypeAlias = Mapping[str, object]
"""The values of `$name` in a text: texts, numbers, booleans, None."""
METADATA: Final = ("_key", "_version", "_publish_time", "_expire_time", "_origin", "_sequence")
_TEXTS: Final = {"_key": "@key", "_origin": "@origin"}
_NUMBERS: Final = {"_version": "@version", "_sequence": "@sequence"}
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.:$#]+")
_WHOLE_TEXT: Final = re.compile(r"[1-9][0-9]{1,14}")
_CAST_WORDS: Final = frozenset({"true", "false", "t", "f", "yes", "no", "y", "n", "on", "off", "null"})
"""DuckDB may take these texts for booleans, where it compares them with some."""
_EXACT: Final = 2**53
_DIGITS_MAX: Final = 15
_ALLOWED_FUNCTIONS: Final = ("GenerateSeries", "Unnest", "Explode")
_OPERATORS: Final = {"EQ": "=", "GT": ">", "GTE": ">=", "LT": "<", "LTE": "<="}
_TURNED: Final = {"=": "=", ">": "<", ">=": "<=", "<": ">", "<=": ">="}
_SHOWN_MAX: Final = 60
"""Characters of a line that an error shows on either side of its place."""
_INSTEAD: Final = {
    "SHOW": ": `sow topics` or `client.topics()` lists them",
    "DESCRIBE": ": `SELECT * FROM orders LIMIT 1` shows the columns",
}
"""The answer to a statement that DuckDB has beside SELECT."""
_REMARKS: Final = re.compile(r"^(?:\w+ )*Error: ")
_PLACE: Final = re.compile(r"\n\n+LINE (\d+): (.*)\n( *)\^[\s\S]*")


@dataclass(slots=True)
class Wanted:
    """A topic that a text reads."""

    topic: str
    schema: str
    """The part of the name before a point that is not quoted; "": there is none."""
    table: str
    place: int
    """Where the text names it: a number of characters."""
    uses: list[Any | None] = field(default_factory=list)
    """For each use, the condition that its records meet, as a tree; None: there is none that can be pushed."""


@dataclass(slots=True)
class Statement:
    """A text that was understood."""

    text: str
    parameters: SqlParameters
    topics: dict[str, Wanted]
    columns: frozenset[str] | None
    """The names of all columns that it may need, and other names; None: all columns."""
    named: list[tuple[str, tuple[str, ...], bool]]
    """Each column: its name, the topics that may have it, and whether one of them must."""

    def spelled(self, name: str) -> str:
        """The spelling of a column that the text uses, whose letters DuckDB takes in upper and lower case alike."""
        return next((one for one, _, _ in self.named if one.lower() == name.lower()), name)

    def filter(self, topic: str, message_type: str) -> tuple[str | None, dict[str, object]]:
        """The filter of a topic with its parameters ([2]); None: it reads all records."""
        writer = _Writer(self.parameters, message_type, self.spelled)
        uses = self.topics[topic].uses
        written = [None if use is None else writer.written(use) for use in uses]
        if not written or None in written:
            return None, {}
        return " OR ".join(dict.fromkeys(f"({one})" for one in written)), writer.values

    def lacking(self, found: Mapping[str, frozenset[str]]) -> bool:
        """True if a column that the text names is in none of the records that were read of its topics. A topic that was
        read by a filter has it perhaps in others, so that the text would mean something else."""
        for name, topics, must in self.named:
            having = [name in found[topic] for topic in topics]
            if not (all(having) if must else any(having)):
                return True
        return False


def parsed(text: str, parameters: SqlParameters | None = None) -> Statement:
    """Understands a text. Raises InvalidArgument with a sentence, the line and the column."""
    sqlglot, exp = library("sqlglot", "sql"), library("sqlglot.expressions", "sql")
    duckdb = library("duckdb", "sql")
    try:
        duckdb.extract_statements(text)
        found = [one for one in sqlglot.parse(text, read="duckdb") if one is not None]
    except duckdb.Error as error:
        raise of_duckdb(text, error) from error
    except sqlglot.errors.SqlglotError as error:
        raise invalid("sql", f"sqlglot does not understand it: {error}") from error
    if len(found) != 1:
        raise invalid("sql", f"give one SELECT: this text has {len(found) or 'no'} statements")
    root = found[0]
    if not isinstance(root, exp.Query):
        called = _called(root)
        raise refused(text, _start(text), f"only SELECT reads topics, and this is {called}{_INSTEAD.get(called, '')}")
    writes = (exp.DML, exp.DDL, exp.Command, exp.Into, exp.Lock)
    for node in root.find_all(*writes):
        if not isinstance(node, exp.Query):
            raise refused(text, _place(exp, node), f"only SELECT reads topics, and it has {_called(node)}")
    return _Reader(exp, text, root, parameters or {}).statement()


class _Reader:
    def __init__(self, exp: Any, text: str, root: Any, parameters: SqlParameters) -> None:
        self._exp = exp
        self._text = text
        self._root = root
        self._parameters = parameters
        self._topics: dict[str, Wanted] = {}
        self._of_tables: dict[int, str] = {}

    def statement(self) -> Statement:
        exp, root = self._exp, self._root
        scope = library("sqlglot.optimizer.scope", "sql")
        try:
            scopes = list(scope.traverse_scope(root))
        except Exception as error:
            raise invalid("sql", f"its names are not clear: {error}") from error
        derived = {
            id(table)
            for one in scopes
            for table in one.tables
            if isinstance(one.sources.get(table.alias_or_name), scope.Scope)
        }
        for table in root.find_all(exp.Table):
            if id(table) not in derived:
                self._add(table)
        if not self._topics:
            raise invalid("sql", "it names no topic: SELECT … FROM orders reads the topic orders")
        seen: set[int] = set()
        named: list[tuple[str, tuple[str, ...], bool]] = []
        for one in scopes:
            if isinstance(one.expression, exp.Select):
                self._read(one, seen, named)
        for table in root.find_all(exp.Table):
            if id(table) in self._of_tables and id(table) not in seen:
                self._topics[self._of_tables[id(table)]].uses.append(None)
        return Statement(self._text, self._parameters, self._topics, self._columns(), named)

    def _add(self, table: Any) -> None:
        exp, text = self._exp, self._text
        if not isinstance(table.this, exp.Identifier):
            if type(table.this).__name__ in _ALLOWED_FUNCTIONS:
                return
            name = table.this.name or table.this.sql("duckdb")
            raise refused(text, _place(exp, table), f"{name} is no topic: tables are topics, and no files or functions")
        if table.args.get("catalog"):
            raise refused(text, _place(exp, table), 'a name with several points is quoted: "a.b.c"')
        topic = f"{table.db}.{table.name}" if table.db else table.name
        alike = next((one for one in self._topics if one.lower() == topic.lower()), topic)
        if alike != topic:
            raise refused(
                text, _place(exp, table), f"{topic} and {alike} are one name in SQL: read them one after the other"
            )
        self._topics.setdefault(topic, Wanted(topic, table.db, table.name, _place(exp, table)))
        self._of_tables[id(table)] = topic

    def _read(self, scope: Any, seen: set[int], named: list[tuple[str, tuple[str, ...], bool]]) -> None:
        """The conditions and the columns of one SELECT."""
        exp, select = self._exp, scope.expression
        sources = {alias: node for alias, (node, _) in scope.selected_sources.items()}
        topics = {alias: self._of_tables[id(node)] for alias, node in sources.items() if id(node) in self._of_tables}
        aliases = {one.alias.lower() for one in select.expressions if one.alias}
        for alias, topic in topics.items():
            node = sources[alias]
            if id(node) in seen:
                continue
            seen.add(id(node))
            use = _Use(exp, alias, alone=len(sources) == 1, aliases=aliases)
            pushes = use.allows(select, node) and len(scope.selected_sources) == len(scope.tables)
            where = select.args.get("where")
            self._topics[topic].uses.append(use.condition(where.this) if where and pushes else None)
        for column in select.find_all(exp.Column):
            if column.find_ancestor(exp.Select) is not select or not column.name:
                continue
            alias = column.parts[0].name if len(column.parts) > 1 else ""
            if alias in topics:
                named.append((column.parts[1].name, (topics[alias],), True))
            elif topics and alias not in sources and not (column.name.lower() in aliases and _is_order(exp, column)):
                alone = len(sources) == 1
                named.append((column.parts[0].name, tuple(topics.values()), alone))

    def _columns(self) -> frozenset[str] | None:
        exp, root = self._exp, self._root
        for star in root.find_all(exp.Star):
            if not isinstance(star.parent, exp.Count):
                return None
        if root.find(exp.Columns, exp.Pivot) or any(join.method == "NATURAL" for join in root.find_all(exp.Join)):
            return None
        names = {one.name for one in root.find_all(exp.Identifier)}
        rows = {one.alias_or_name.lower() for one in root.find_all(exp.Table)}
        if any(len(column.parts) == 1 and column.name.lower() in rows for column in root.find_all(exp.Column)):
            return None  # a whole row, as in SELECT o FROM orders o
        return frozenset(names)


@dataclass(frozen=True, slots=True)
class _Use:
    """A topic in the FROM of one SELECT."""

    exp: Any
    alias: str
    alone: bool
    aliases: set[str]
    """DuckDB lets conditions name results, too: `SELECT a AS b … WHERE b = 1`."""

    def allows(self, select: Any, table: Any) -> bool:
        """True if fewer rows of the topic may be joined. ASOF takes the nearest one, and a sample takes any."""
        plain = all(join.method in ("", "NATURAL") for join in select.args.get("joins") or ())
        special = table.args.get("sample") or table.args.get("pivots") or select.args.get("sample")
        # Identifiers of one spelling: in another one, the alias of a table may be the name of a column.
        return plain and not special

    def condition(self, node: Any) -> Any | None:
        """The part of a condition that can be pushed: ("AND" or "OR", parts), or (operator, column, value)."""
        exp = self.exp
        node = node.unnest()
        match node:
            case exp.And() | exp.Or():
                parts = [self.condition(one) for one in (node.left, node.right)]
                if isinstance(node, exp.Or):
                    return None if None in parts else ("OR", parts)
                kept = [part for part in parts if part is not None]
                return ("AND", kept) if kept else None
            case exp.In() if not node.args.get("query") and not node.args.get("unnest") and node.expressions:
                return self._any([("=", node.this, one) for one in node.expressions])
            case exp.Between():
                both = [self._one(">=", node.this, node.args["low"]), self._one("<=", node.this, node.args["high"])]
                return None if None in both or node.args.get("symmetric") else ("AND", both)
            case exp.Is() if isinstance(node.expression, exp.Null) and self.alone:
                return self._one("NULL", node.this, node.expression)
            case exp.Like() if not isinstance(node.parent, exp.Escape):
                return self._one("LIKE", node.this, node.expression)
        sign = _OPERATORS.get(type(node).__name__)
        if sign is None:
            return None
        return self._one(sign, node.left, node.right) or self._one(_TURNED[sign], node.right, node.left)

    def _any(self, comparisons: Sequence[tuple[str, Any, Any]]) -> Any | None:
        found = [self._one(*one) for one in comparisons]
        # DuckDB takes all members of a list for one type.
        kinds = {one[2].is_string if one and isinstance(one[2], self.exp.Literal) else None for one in found}
        return ("OR", found) if len(kinds) == 1 and kinds != {None} else None

    def _one(self, sign: str, column: Any, value: Any) -> Any | None:
        exp = self.exp
        if not isinstance(column, exp.Column) or len(column.parts) > 2:
            return None
        if column.table:
            if column.table != self.alias:
                return None
        elif not self.alone or column.name.lower() in self.aliases:
            return None
        inner = value.this if isinstance(value, exp.Neg) else value
        if not isinstance(inner, (exp.Literal, exp.Placeholder, exp.Null)):
            return None
        return (sign, column.name, value)


class _Writer:
    """Writes conditions as a filter ([2], [3])."""

    def __init__(self, parameters: SqlParameters, message_type: str, spelled: Any) -> None:
        self._parameters = parameters
        self._type = message_type
        self._spelled = spelled
        self.values: dict[str, object] = {}

    def written(self, node: Any) -> str | None:
        """The filter; None: it would have to keep every record."""
        if node[0] in ("AND", "OR"):
            parts = [self.written(one) for one in node[1]]
            if node[0] == "OR":
                return None if None in parts else f"({' OR '.join(filter(None, parts))})"
            return f"({' AND '.join(filter(None, parts))})" if any(parts) else None
        sign, name, value = node
        found = self._value(value)
        lower = name.lower()
        if lower in METADATA:
            is_text = isinstance(found, str) and lower in _TEXTS and sign in _TURNED
            is_number = type(found) is int and abs(found) < _EXACT and lower in _NUMBERS and sign in _TURNED
            path = (_TEXTS | _NUMBERS).get(lower, "")
            return f"{path} {sign} {self._named(found)}" if is_text or is_number else None
        name = self._spelled(name)
        if not _PLAIN_NAME.fullmatch(name) or self._type not in ("json", "fix", "nvfix"):
            return None
        return self._field(f"/{name}", sign, found)

    def _field(self, path: str, sign: str, found: object) -> str | None:
        if sign == "NULL":
            return f"{path} IS NULL"
        if isinstance(found, str):
            if sign == "LIKE":
                prefix = found[:-1]
                is_prefix = found.endswith("%") and not re.search(r"[%_\\]", prefix) and self._is_text(prefix)
                return f"{path} BEGINS WITH {self._named(prefix)}" if is_prefix and prefix[:1].isalpha() else None
            is_same = self._is_text(found) or _WHOLE_TEXT.fullmatch(found)
            return f"{path} = {self._named(found)}" if sign == "=" and is_same else None
        if self._type != "json" or isinstance(found, bool) or not isinstance(found, (int, float)):
            return None
        if sign not in _TURNED or abs(found) > _EXACT or len(repr(found).strip("-0.")) > _DIGITS_MAX:
            return None
        # DuckDB rounds a text that it compares with a whole number, and takes true for 1.
        booleans = [text for text, number in (("true", 1), ("false", 0)) if _holds(number, sign, found)]
        others = "".join(f" OR {path} = {text}" for text in booleans)
        return f"({path} {sign} {self._named(found)} OR {path} >= ''{others})"

    def _is_text(self, text: str) -> bool:
        """True if DuckDB takes no other value than this text for equal to it."""
        if "\\" in text or not text:
            return False
        if self._type != "json":
            return True
        if text.lower() in _CAST_WORDS or text[0] in "[{(\"'" or text != text.strip():
            return False
        for reads in (float, lambda one: int(one, 0), msgspec.json.decode):
            try:
                reads(text)
            except (ValueError, msgspec.MsgspecError):
                continue
            return False
        return True

    def _value(self, node: Any) -> object:
        kind = type(node).__name__
        if kind == "Neg":
            below = self._value(node.this)
            return -below if isinstance(below, (int, float)) else None
        if kind == "Placeholder":
            return self._parameters.get(node.name)
        if kind != "Literal" or node.is_string:
            return node.this if kind == "Literal" else None
        try:
            return int(node.this)
        except ValueError:
            digits = node.this.partition("e")[0].replace(".", "")
            return float(node.this) if digits.isdigit() and len(digits) <= _DIGITS_MAX else None

    def _named(self, value: object) -> str:
        name = next((name for name, one in self.values.items() if one == value and type(one) is type(value)), None)
        if name is None:
            name = f"p{len(self.values) + 1}"
            self.values[name] = value
        return f":{name}"


def _holds(number: int, sign: str, bound: float) -> bool:
    return {
        "=": number == bound, ">": number > bound, ">=": number >= bound, "<": number < bound, "<=": number <= bound,
    }[sign]  # fmt: skip


def _is_order(exp: Any, column: Any) -> bool:
    return isinstance(column.find_ancestor(exp.Order, exp.Select), exp.Order)


# ---- errors with their place ----


def refused(text: str, place: int, sentence: str) -> InvalidArgument:
    """An error at a place of a text: its line and column, counted from 1, and a caret."""
    place = max(0, min(place, len(text)))
    line = text.count("\n", 0, place) + 1
    column = place - (text.rfind("\n", 0, place) + 1)
    shown = text.split("\n")[line - 1]
    first, end = max(0, column - _SHOWN_MAX), column + _SHOWN_MAX
    before = "…" * (first > 0) + shown[first:column].replace("\t", " ")
    behind = shown[column:end].replace("\t", " ") + "…" * (end < len(shown))
    return invalid("sql", f"{sentence} (line {line}, column {column + 1})\n  {before}{behind}\n  {' ' * len(before)}^")


def of_duckdb(text: str, error: Exception) -> InvalidArgument:
    """DuckDB's error, with the place in the text where it knows one."""
    told = str(error)
    found = _PLACE.search(told)
    sentence = _REMARKS.sub("", (told if found is None else told[: found.start()]).strip())
    sentence = sentence.replace("\n\t", " ").replace("\n", "; ").replace("!;", ";").rstrip("!.;")
    if found is None:
        return invalid("sql", sentence)
    line = int(found[1])
    label = f"LINE {line}: "
    shown = text.split("\n")[line - 1 : line]
    column = len(found[3]) - len(label)
    if shown and found[2].startswith("..."):  # DuckDB cuts long lines
        begin = shown[0].find(found[2].removeprefix("...").removesuffix("..."))
        column += begin - 3
    return refused(text, _offset(text, line, column + 1), sentence)


def _offset(text: str, line: int, column: int) -> int:
    lines = text.split("\n")
    return sum(len(one) + 1 for one in lines[: line - 1]) + column - 1


def _start(text: str) -> int:
    return len(text) - len(text.lstrip())


def _place(exp: Any, node: Any) -> int:
    places = [one.meta["start"] for one in node.find_all(exp.Identifier) if "start" in one.meta]
    own = node.meta.get("start")
    return own if own is not None else min(places, default=0)


def _called(node: Any) -> str:
    return (
        re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(node).__name__).upper()
        if type(node).__name__ != "Command"
        else (str(node.this).upper())
    )
