"""DuckDB as a peer: it groups what the client has read of a topic. The only module that loads DuckDB.

The topic is read in the cheapest way that there is: an export of the wanted fields in packed lines. Arrow's reader of
JSON turns them into columns of known types.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.processes import NotInstalled
from sow_client import Client


class DuckDb:
    """One statement on the records of a topic. Its table is `records`."""

    def __init__(self, statement: str, fields: Mapping[str, str]) -> None:
        """`fields`: those that the statement reads, with their types as Arrow names them. Raises NotInstalled."""
        for name in ("duckdb", "pyarrow"):
            if importlib.util.find_spec(name) is None:
                raise NotInstalled(f"{name} not installed (pip install {name})")
        self._duckdb: Final[Any] = importlib.import_module("duckdb")
        self._pa: Final[Any] = importlib.import_module("pyarrow")
        self._json: Final[Any] = importlib.import_module("pyarrow.json")
        self._statement: Final = statement
        self._fields: Final = tuple(fields)
        schema = self._pa.schema([(name, self._pa.type_for_alias(kind)) for name, kind in fields.items()])
        self._as_columns: Final[Any] = self._json.ParseOptions(schema, unexpected_field_behavior="ignore")

    def rows(self, client: Client, topic: str) -> list[tuple[Any, ...]]:
        """The rows of the statement, of all records."""
        export = client.open_export(topic)
        try:
            tables = [
                self._json.read_json(io.BytesIO(packed.payloads), parse_options=self._as_columns)
                for part in range(len(export.parts))
                for packed in client.read_export(export.id, part, lines=True, fields=self._fields)
            ]
        finally:
            client.close_export(export.id)
        with self._duckdb.connect() as connection:
            connection.register("records", self._pa.concat_tables(tables))
            found: list[tuple[Any, ...]] = connection.execute(self._statement).fetchall()
        return found

    @property
    def described(self) -> str:
        """Its version."""
        return f"DuckDB {self._duckdb.__version__}"
