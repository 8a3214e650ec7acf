"""`sow sql`: a SELECT over topics, answered by DuckDB."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from decimal import Decimal
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import click
import msgspec

from sow_cli import arguments, display, exporting, packing
from sow_cli.filter_parameters import Values, param_option
from sow_cli.output import Fact, Format, Output, moment, note, record_output_option
from sow_cli.rows import quoted_cell, quoted_safely
from sow_cli.session import Session

if TYPE_CHECKING:
    from sow_client._sql_database import SqlTopic
    from sow_client.blocking._querying_sql import SqlResult

_ROWS_MAX: Final = 1_000
"""A table has so many rows."""


@click.command(short_help="Answer a SELECT over topics.")
@click.argument("text", metavar="SELECT")
@param_option
@click.option("--memory", default="1GB", show_default=True, metavar="SIZE", help="The most memory that DuckDB takes.")
@click.option("--explain", is_flag=True, help="Instead of the rows: what was read of each topic, and how.")
@click.option("--no-push", is_flag=True, help="Read all records: the server judges no condition.")
@click.option(
    "-o",
    "--output-file",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file, whose end tells the format.",
)
@record_output_option
@click.pass_obj
def sql(
    session: Session,
    *,
    text: str,
    parameters: Values | None,
    memory: str,
    explain: bool,
    no_push: bool,
    file: Path | None,
    output: Output,
) -> None:
    """Answer one SELECT of DuckDB. Its tables are topics, its columns their fields, and the metadata _key, _version,
    _publish_time, _expire_time, _origin and _sequence.

    All topics are read as of one instant, which stderr tells. A name with other characters than letters, digits
    and _ is quoted: "md-prices". $name in the text is a value of --param. It needs DuckDB: pip install 'sow[sql]'.

    \b
    Examples:
      sow sql "SELECT site, avg(v) FROM devices JOIN sites USING (id)
        GROUP BY site"
      sow sql "SELECT desk, count(*) FROM orders
        WHERE _expire_time < now() + INTERVAL 1 HOUR GROUP BY desk"
      sow sql "SELECT * FROM orders WHERE desk = \\$desk" --param desk=rates \\
        -o orders.parquet
      sow sql --explain "SELECT id FROM orders WHERE desk = 'rates'"
    """
    arguments.refuse_together(("--explain", explain), ("-o", file is not None))
    if output.format is Format.RAW:
        raise click.UsageError("--format raw is for records")
    kind = output.format if file is None else exporting.form_of(file)
    with session.client() as client, ExitStack() as stack:
        try:
            result = stack.enter_context(client.sql(text, parameters, memory=memory, push=not no_push))
        except ImportError as error:
            needs = f"sow sql needs DuckDB, sqlglot and pyarrow: pip install 'sow[sql]' ({error})"
            raise click.UsageError(needs) from error
        if explain:
            plans = list(map(_explained, result.topics.values()))
            output.many(plans, names=[fact.name for fact in plans[0]], nothing="no topics")
            return
        if file is not None:
            with exporting.replaced(file) as plain, packing.packed(plain, file.name) as sink:
                _write(result, kind, sink, output)
        elif kind is Format.TABLE:
            _show(result, output)
        else:
            output.page()
            _write(result, kind, None, output)
        for one in result.topics.values():
            place = f", bookmark {one.bookmark}" if one.bookmark else ""
            instant = one.as_of.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            note(f"{display.safe(one.topic)}: {display.records(one.records)} read, as of {instant}{place}")


def _explained(read: SqlTopic) -> list[Fact]:
    values = msgspec.json.encode(read.parameters).decode()
    return [
        Fact("topic", read.topic, display.safe(read.topic)),
        moment("as_of", read.as_of, label="as of"),
        Fact("bookmark", read.bookmark, read.bookmark or "", in_lists=False),
        Fact("records", read.records, display.count(read.records), right=True),
        Fact("columns", list(read.columns), display.safe(", ".join(read.columns))),
        Fact("filter", read.filter, display.safe(read.filter or display.NOT_SET)),
        Fact("parameters", values, display.safe(values if read.parameters else display.NOT_SET)),
    ]


def _show(result: SqlResult, output: Output) -> None:
    rows = list(islice(result.rows(), _ROWS_MAX + 1))
    facts = [list(map(_fact, result.columns, row)) for row in rows[:_ROWS_MAX]]
    output.many(facts, names=result.columns, nothing="no rows")
    if len(rows) > _ROWS_MAX:
        note(f"the first {_ROWS_MAX:,} rows, and there are more: a pipe gets all of them")


def _fact(name: str, value: object) -> Fact:
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    shown = display.NOT_SET if value is None else display.safe(_cell(value))
    return Fact(name, None, shown, label=display.safe(name), right=is_number)


def _write(result: SqlResult, kind: Format, file: IO[bytes] | None, output: Output) -> None:
    """Writes the rows, piece by piece, into a file; None: to stdout."""
    from sow_client._sql_database import tuples

    if kind in (Format.PARQUET, Format.ARROW):
        from sow_cli.arrow import write_rows

        write_rows(file or sys.stdout.buffer, result.schema, result.batches(), is_parquet=kind is Format.PARQUET)
        sys.stdout.buffer.flush()
        return
    quoted, between = quoted_safely if output.csv_safe else quoted_cell, b"[\n"
    write = output.write if file is None else file.write  # a terminal gets no control characters of the data
    if kind is Format.CSV:
        write(",".join(map(quoted, result.columns)).encode() + b"\n")
    for batch in result.batches():
        rows = tuples(batch)
        if kind is Format.CSV:
            lines = [",".join(["" if one is None else quoted(_cell(one)) for one in row]).encode() for row in rows]
        else:
            lines = [_encode(_plain(dict(zip(result.columns, row, strict=True)))) for row in rows]
        if kind is Format.JSON and lines:
            write(between + b",\n".join(lines))
            between = b",\n"
        elif lines:
            write(b"\n".join(lines) + b"\n")
    if kind is Format.JSON:
        write(b"[]\n" if between == b"[\n" else b"\n]\n")


_encode: Final = msgspec.json.Encoder(decimal_format="number", enc_hook=str).encode
"""Values of DuckDB as JSON has them, exactly: numbers as numbers, times as ISO 8601, bytes as base64."""


def _plain(value: object) -> object:
    match value:
        case float() if not isfinite(value):
            return repr(value)
        case dict():
            return {str(name): _plain(one) for name, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
    return value


def _cell(value: object) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else _encode(plain).decode().strip('"')
