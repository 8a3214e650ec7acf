"""Texts of SQL: the topics that one reads, the columns that it needs, and conditions that choose records. Pure.

sqlglot parses the text, and DuckDB runs it as it stands: nothing is written anew.

    [1]  One SELECT is let through, over topics alone. DuckDB is closed besides (_sql_database [1]).
    [2]  Simple conditions choose the records of a topic, each by itself: a text compares with texts, a number with
         numbers. The client judges every record by them, so an answer is the same whether the server has judged or not.
         DuckDB's own conditions keep no other record, and judge the chosen ones once more.
    [3]  [2] needs that each compared column has values of the compared type alone among the chosen records. If one has
         others, or none, all records are the table (`Choice.doubts`), as DuckDB may convert one type to the other.
    [4]  A filter is written with names for its values, which are those of the text or of its parameters.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from types import NoneType
from typing import Any, Final, TypeAlias

import msgspec

from sow_client._frames import library
from sow_client._records import invalid
from sow_client.errors import InvalidArgument

SqlParameters: TypeAlias = Mapping[str, object]
"""The values of `$name` in a text: texts, numbers, booleans, times, None."""
Row: TypeAlias = Mapping[str, object]
"""The fields of a record, and metadata as numbers and texts."""
METADATA: Final[Mapping[str, type]] = {
    "_key": str, "_version": int, "_publish_time": datetime, "_expire_time": datetime, "_origin": str, "_sequence": int,
}  # fmt: skip
_COMPARED: Final[Mapping[str, frozenset[type]]] = {
    "json": frozenset({str, int, float, bool}), "msgpack": frozenset({str, bool}),  # its NaN is a null to the server
    "fix": frozenset({str}), "nvfix": frozenset({str}),
}  # fmt: skip
"""The types of values that the server compares as DuckDB does."""
_TYPES: Final = (frozenset({str}), frozenset({bool}), frozenset({int, float}))
_TESTS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq, ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
    "BEGINS WITH": str.startswith, "IN": lambda value, many: value in many,
}  # fmt: skip
_OPERATORS: Final = {"EQ": "=", "GT": ">", "GTE": ">=", "LT": "<", "LTE": "<="}
_TURNED: Final = {"=": "=", ">": "<", ">=": "<=", "<": ">", "<=": ">="}
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.:$#]+")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00(:00)?)?)?")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EXACT: Final = 2**53
_DIGITS_MAX: Final = 15
_DAY: Final = len("2026-01-31")
_LEAVES_MAX: Final = 500
_BYTES_MAX: Final = 40_000
_LIST_MAX: Final = 10_000
"""Bounds of a filter (docs/filters.md), with room to spare. Beyond them the client judges alone."""
_ALLOWED_FUNCTIONS: Final = ("GenerateSeries", "Unnest", "Explode")
_TAKEN: Final = ("main", "memory", "system", "temp")
"""Names that DuckDB has before a point."""
_SHOWN_MAX: Final = 60
"""Characters of a line that an error shows on either side of its place."""
_INSTEAD: Final = {
    "SHOW": ": `sow topics` or `client.topics()` lists them",
    **dict.fromkeys(("DESC", "DESCRIBE", "SUMMARIZE"), ": `SELECT * FROM orders LIMIT 1` shows the columns"),
}
"""The answer to a statement that DuckDB has beside SELECT."""
_REMARKS: Final = re.compile(r"^(?:\w+ )*Error: ")
_PLACE: Final = re.compile(r"\n\n+LINE (\d+): (.*)\n( *)\^[\s\S]*")


@dataclass(frozen=True, slots=True)
class Choice:
    """Conditions that choose the records of a topic ([2])."""

    filter: str
    values: Mapping[str, object]
    """The values of the names in the filter."""
    holds: Callable[[Row], bool]
    compared: frozenset[tuple[str, frozenset[type]]]
    """The fields that are compared, with the types of their values."""

    @property
    def filtered(self) -> tuple[str | None, Mapping[str, object]]:
        """The filter for the server; None: it would be too large."""
        longest = max((len(one) for one in self.values.values() if isinstance(one, list)), default=0)
        size = len(self.filter) + len(msgspec.json.encode(self.values))
        is_short = size <= _BYTES_MAX and len(self.values) <= _LEAVES_MAX and longest <= _LIST_MAX
        return (self.filter, self.values) if is_short else (None, {})

    def doubts(self, kinds: Mapping[str, set[type]]) -> bool:
        """True if a field that is compared has values of another type among the chosen records, or none ([3])."""
        return any(not set() < kinds.get(name, set()) - {NoneType} <= types for name, types in self.compared)


@dataclass(slots=True)
class Wanted:
    """A topic that a text reads."""

    parts: tuple[str, ...]
    """Its name, as DuckDB takes it: a schema and a table for `md.prices` without quotation marks."""
    uses: list[tuple[Callable[[Any], bool], Any] | None] = field(default_factory=list)
    """For each use, a test for its columns, and the condition of its SELECT; None: it may need all records."""


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

    def choice(self, topic: str, message_type: str) -> Choice | None:
        """The records of a topic that it needs; None: all."""
        chooser = _Chooser(self, message_type)
        found = [None if use is None else chooser.choice(*use) for use in self.topics[topic].uses]
        return _joined("OR", found)

    def lacks(self, found: Mapping[str, frozenset[str]]) -> bool:
        """True if a column that the text names is in none of these of its topics."""
        for name, topics, must in self.named:
            having = [name in found[topic] for topic in topics]
            if not (all(having) if must else any(having)):
                return True
        return False


def parsed(text: str, parameters: SqlParameters | None = None) -> Statement:
    """Understands a text. Raises InvalidArgument with a sentence, the line and the column."""
    sqlglot, exp, duckdb = (library(name, "sql") for name in ("sqlglot", "sqlglot.expressions", "duckdb"))
    text.encode()  # half a surrogate pair: the caller names it
    start = len(text) - len(text.lstrip())
    try:
        found = duckdb.extract_statements(text)
        if len(found) != 1:
            raise invalid("sql", f"give one SELECT: this text has {len(found) or 'no'} statements")
        called = text[start:].partition(" ")[0].upper()
        if called in _INSTEAD or found[0].type != duckdb.StatementType.SELECT:
            raise refused(text, start, f"only SELECT reads topics, and this is {called}{_INSTEAD.get(called, '')}")
        # A remark after the last semicolon is a node of its own.
        root = next(one for one in sqlglot.parse(text, read="duckdb") if one and not isinstance(one, exp.Semicolon))
    except duckdb.Error as error:
        raise of_duckdb(text, error) from error
    except sqlglot.errors.SqlglotError as error:
        raise invalid("sql", f"sqlglot does not understand it: {error}") from error
    except RecursionError as error:
        raise invalid("sql", "it is nested too deeply") from error
    if not isinstance(root, exp.Query):
        called = type(root).__name__.upper()
        raise refused(text, start, f"only SELECT reads topics, and this is {called}{_INSTEAD.get(called, '')}")
    for node in root.find_all(exp.DML, exp.DDL, exp.Command, exp.Into, exp.Lock):
        if not isinstance(node, exp.Query):
            raise refused(
                text, _place(exp, node), f"only SELECT reads topics, and it has {type(node).__name__.upper()}"
            )
    return _Reader(exp, text, root, parameters or {}).statement()


class _Reader:
    """Finds topics, conditions and columns in the tree of a text."""

    def __init__(self, exp: Any, text: str, root: Any, parameters: SqlParameters) -> None:
        self._exp = exp
        self._text = text
        self._root = root
        self._spelled = {id(table): (table.db, table.name) for table in root.find_all(exp.Table)}
        self._of_tables: dict[int, str] = {}
        self._statement = Statement(text, parameters, {}, None, [])

    def statement(self) -> Statement:
        exp, found = self._exp, self._statement
        scope = library("sqlglot.optimizer.scope", "sql")
        for node in self._root.find_all(exp.Table, exp.TableAlias):
            if isinstance(node.this, exp.Identifier):  # sqlglot tells `w` from `W`, and DuckDB does not
                node.this.set("this", node.this.name.lower())
        try:
            scopes = list(scope.traverse_scope(self._root))
            for one in scopes:
                one.selected_sources  # noqa: B018  # it is found here, or refused
        except Exception as error:
            raise invalid("sql", f"its names are not clear: {error}") from error
        derived = {
            id(table)
            for one in scopes
            for table in one.tables
            if isinstance(one.sources.get(table.alias_or_name), scope.Scope)
        }
        tables = [table for table in self._root.find_all(exp.Table) if id(table) not in derived]
        for table in tables:
            self._add(table)
        if not found.topics:
            raise invalid("sql", "it names no topic: SELECT … FROM orders reads the topic orders")
        seen: set[int] = set()
        for one in scopes:
            if isinstance(one.expression, exp.Select):
                self._read(one, seen)
        for table in tables:
            if id(table) in self._of_tables and id(table) not in seen:
                found.topics[self._of_tables[id(table)]].uses.append(None)
        found.columns = self._columns()
        return found

    def _add(self, table: Any) -> None:
        topics, place = self._statement.topics, _place(self._exp, table)
        if not isinstance(table.this, self._exp.Identifier):
            if type(table.this).__name__ in _ALLOWED_FUNCTIONS:
                return
            name = self._text[place : table.this.meta.get("end", place) + 1]
            raise refused(self._text, place, f"{name} is no topic: tables are topics, and no files or functions")
        if table.args.get("catalog"):
            raise refused(self._text, place, 'a name with several points is quoted: "a.b.c"')
        parts = tuple(filter(None, self._spelled[id(table)]))
        topic = ".".join(parts)
        if table.db.lower() in _TAKEN:
            raise refused(self._text, place, f'this name is quoted: "{topic}"')
        alike = next((one for one in topics if one.lower() == topic.lower()), topic)
        if alike != topic:
            raise refused(self._text, place, f"{topic} and {alike} are one name in SQL: read them one after the other")
        if topics.setdefault(topic, Wanted(parts)).parts != parts:
            raise refused(self._text, place, f'quote it everywhere, or nowhere: "{topic}"')
        self._of_tables[id(table)] = topic

    def _read(self, scope: Any, seen: set[int]) -> None:
        """The conditions and the columns of one SELECT."""
        exp, select, found = self._exp, scope.expression, self._statement
        sources = {alias: node for alias, (node, _) in scope.selected_sources.items()}
        topics = {alias: self._of_tables[id(node)] for alias, node in sources.items() if id(node) in self._of_tables}
        aliases = {one.alias.lower() for one in select.expressions if one.alias}
        # ASOF takes the nearest row, and a sample any: others would be taken where fewer are joined.
        fewer = all(join.method in ("", "NATURAL") for join in select.args.get("joins") or ())
        fewer &= len(sources) == len(scope.tables) and not select.args.get("sample")
        alone = len(sources) == 1
        for alias, topic in topics.items():
            node, where = sources[alias], select.args.get("where")
            if id(node) not in seen:
                seen.add(id(node))
                pushed = fewer and where and not any(map(node.args.get, ("sample", "pivots")))
                pushed = pushed and not node.alias_column_names
                use = (partial(_of, alias, aliases if alone else None), where.this) if pushed else None
                found.topics[topic].uses.append(use)
        for column in scope.find_all(exp.Column):
            if not column.name:
                continue
            alias = column.parts[0].name.lower() if len(column.parts) > 1 else ""
            if alias in topics:
                found.named.append((column.parts[1].name, (topics[alias],), True))
            elif topics and alias not in sources:
                if column.name.lower() in aliases and isinstance(
                    column.find_ancestor(exp.Order, exp.Select), exp.Order
                ):
                    continue
                found.named.append((column.parts[0].name, tuple(topics.values()), alone))

    def _columns(self) -> frozenset[str] | None:
        exp, root = self._exp, self._root
        rows = {one.alias_or_name.lower() for one in root.find_all(exp.Table)}
        whole = [star for star in root.find_all(exp.Star) if not isinstance(star.parent, exp.Count)]
        whole += [join for join in root.find_all(exp.Join) if join.method == "NATURAL"]
        # Rows, as in SELECT o FROM orders o, and columns by their places.
        whole += [one for one in root.find_all(exp.Column) if one.name.lower() in rows]
        whole += [one for one in root.find_all(exp.Table) if id(one) in self._of_tables and one.alias_column_names]
        if whole or root.find(exp.Columns, exp.Pivot, exp.PositionalColumn, exp.Describe, exp.Summarize):
            return None
        return frozenset(one.name for one in root.find_all(exp.Identifier))


def _of(alias: str, results: set[str] | None, column: Any) -> bool:
    """True if a column is surely of the topic with this alias. `results`: the names of results, which conditions may
    mean, too: `SELECT a AS b … WHERE b = 1`. None: there are other tables, so only one with the alias is."""
    if len(column.parts) > 1:
        return len(column.parts) == 2 and column.table.lower() == alias
    return results is not None and column.name.lower() not in results


class _Chooser:
    """Makes choices for one topic ([2], [4])."""

    def __init__(self, statement: Statement, message_type: str) -> None:
        self._exp = library("sqlglot.expressions", "sql")
        self._statement = statement
        self._type = message_type
        self._names = 0

    def choice(self, has: Callable[[Any], bool], node: Any) -> Choice | None:
        """The records that meet at least the part of a condition that is simple; None: there is none."""
        exp = self._exp
        node = node.unnest()
        if node.args.get("negate") or node.args.get("symmetric"):
            return None
        one = partial(self._compared, has)
        match node:
            case exp.And() | exp.Or():
                parts = [self.choice(has, part) for part in node.flatten()]
                return _joined("OR" if isinstance(node, exp.Or) else "AND", parts)
            case exp.In() if node.expressions and not node.args.get("query"):
                return one("IN", node.this, node.expressions)
            case exp.Between():
                return _joined("AND", [one(">=", node.this, node.args["low"]), one("<=", node.this, node.args["high"])])
            case exp.Is() if isinstance(node.expression, exp.Null):
                return one("IS NULL", node.this, node.expression)
            case exp.Like() if not isinstance(node.parent, exp.Escape):
                return one("LIKE", node.this, node.expression)
            case exp.Column():
                return one("=", node, exp.true())
            case exp.Not() if isinstance(node.this.unnest(), exp.Column):
                return one("=", node.this.unnest(), exp.false())
        sign = _OPERATORS.get(type(node).__name__)
        if sign is None:
            return None
        return one(sign, node.left, node.right) or one(_TURNED[sign], node.right, node.left)

    def _compared(self, has: Callable[[Any], bool], sign: str, column: Any, literal: Any) -> Choice | None:
        if not isinstance(column, self._exp.Column) or not has(column):
            return None
        values: list[Any] = list(map(self._value, literal if isinstance(literal, list) else [literal]))
        name = column.name.lower()
        kind = METADATA.get(name)
        path = f"@{name[1:]}"
        if sign == "IS NULL":
            # Beside other tables it is true of rows that an outer join has made, too.
            if name != "_expire_time" or not has(self._exp.column(name)):
                return None
            return Choice(f"{path} IS NULL", {}, lambda row: row["_expire_time"] is None, frozenset())
        if kind is None:
            name = self._statement.spelled(column.name)
            path = f"/{name}"
            types = self._types(sign, values) if _PLAIN_NAME.fullmatch(name) else frozenset()
        elif kind is datetime:
            values, types = list(map(_micros, values)), frozenset({int})
        else:
            types = frozenset({kind})
        # DuckDB may round larger numbers.
        if not all(type(one) in types and (isinstance(one, str) or abs(one) < _EXACT) for one in values):
            return None
        value: Any = values if sign == "IN" else values[0]
        if sign == "LIKE":
            sign, value = "BEGINS WITH", str(value)[:-1]
            if not value or re.search(r"[%_\\]", value) or values[0] != f"{value}%":
                return None
        test = _TESTS[sign]

        def holds(row: Row) -> bool:
            found = row.get(name)
            return type(found) in types and test(found, value)

        self._names += 1
        compared = frozenset({(name, types)} if kind is None else ())
        return Choice(f"{path} {sign} :p{self._names}", {f"p{self._names}": value}, holds, compared)

    def _types(self, sign: str, values: Sequence[object]) -> frozenset[type]:
        """The types of fields that compare with values as in DuckDB; empty: the server has another rule."""
        is_json = self._type == "json"
        allowed = _COMPARED.get(self._type, frozenset())
        types = next((one for one in _TYPES if all(type(value) in one & allowed for value in values)), frozenset())
        # Texts of other types may be no UTF-8, and have another order in DuckDB, and a backslash.
        strange = any(value == "" or (isinstance(value, str) and not is_json and "\\" in value) for value in values)
        ordered = sign in ("=", "IN", "LIKE") or (is_json and bool not in types)
        return types if ordered and not strange else frozenset()

    def _value(self, node: Any) -> object:
        match type(node).__name__:
            case "Neg":
                below = self._value(node.this)
                return -below if isinstance(below, int | float) else None
            case "Placeholder":
                return self._statement.parameters.get(node.name)
            case "Boolean":
                return bool(node.this)
            case "Literal" if node.is_string:
                return str(node.this)
            case "Literal" if node.this.isdigit():
                return int(node.this)
            case "Literal":
                return float(node.this) if len(re.sub("[eE].*|[.]", "", node.this)) <= _DIGITS_MAX else None
            case "Cast" if node.to.this.name in ("TIMESTAMP", "TIMESTAMPNTZ", "TIMESTAMPTZ", "DATE"):
                value = self._value(node.this)
                return _time(value) if node.to.this.name != "DATE" or len(str(value)) == _DAY else None
        return None


def _joined(word: str, parts: Sequence[Choice | None]) -> Choice | None:
    """Choices together. AND may leave parts out."""
    found = [part for part in parts if part is not None]
    if not found or (word == "OR" and len(found) < len(parts)):
        return None
    if len(found) == 1:
        return found[0]
    tests, every = [part.holds for part in found], all if word == "AND" else any
    return Choice(
        f"({f' {word} '.join(part.filter for part in found)})",
        {name: value for part in found for name, value in part.values.items()},
        lambda row: every(test(row) for test in tests),
        frozenset().union(*(part.compared for part in found)),
    )


def _time(value: object) -> datetime | None:
    """A time that a text tells; None: DuckDB might read it as another one."""
    if isinstance(value, str) and _TIME.fullmatch(value):
        with suppress(ValueError):
            value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def _micros(value: object) -> int | None:
    found = _time(value)
    return None if found is None else (found - _EPOCH) // timedelta(microseconds=1)


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


def of_duckdb(text: str, error: Exception, *, lines_before: int = 0) -> InvalidArgument:
    """DuckDB's error, with the place in the text where it knows one. `lines_before`: DuckDB saw more above it."""
    told = str(error)
    found = _PLACE.search(told)
    sentence = _REMARKS.sub("", (told if found is None else told[: found.start()]).strip())
    sentence = re.sub(r"[!;]*\n+", "; ", sentence.replace("\n\t", " ")).rstrip("!.;")
    if found is None:
        return invalid("sql", sentence)
    line = int(found[1]) - lines_before
    lines = text.split("\n")
    column = len(found[3]) - len(f"LINE {found[1]}: ")
    if found[2].startswith("...") and line <= len(lines):  # DuckDB cuts long lines
        column += lines[line - 1].find(found[2].removeprefix("...").removesuffix("...")) - 3
    return refused(text, sum(len(one) + 1 for one in lines[: line - 1]) + column, sentence)


def _place(exp: Any, node: Any) -> int:
    own = [one.meta["start"] for one in (node, node.this) if "start" in getattr(one, "meta", ())]
    places = own[:1] or [one.meta["start"] for one in node.find_all(exp.Identifier) if "start" in one.meta]
    return min(places, default=0)
