"""Options of the data source as frozen values. `option_parsing` makes them of the texts from Spark.

`Reading` and `Writing` are the two directions. A stream uses the same values as a batch. They are plain values, which
are pickled to executors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, TypeAlias

from sow_client._parameters import Parameters

ReadUse: TypeAlias = Literal["snapshot", "stream"]
"""The uses of reading: spark.read and spark.readStream."""
WriteUse: TypeAlias = Literal["append", "overwrite", "stream"]
"""The uses of writing: .write in its two modes, and .writeStream."""

DEFAULT_SERVER: Final = "127.0.0.1:7450"
NESTING_MAX: Final = 60
"""Deeper types are neither inferred nor written: Arrow's format has 64 levels."""

PayloadForm: TypeAlias = Literal["columns", "string", "binary"]
"""The form in which a payload becomes columns: a column for each field of a json document, or one column `payload`."""
ParseMode: TypeAlias = Literal["FAILFAST", "PERMISSIVE", "DROPMALFORMED"]
"""The treatment of a document that does not fit the schema: the job fails, the field is null, the row is left out."""
MetadataColumns: TypeAlias = Literal["true", "false", "changes"]
"""The metadata columns of records, none, or also those of changes."""
WriteMode: TypeAlias = Literal["publish", "delta"]
"""The two ways to write: rows replace records, or are merged into them."""
BadRows: TypeAlias = Literal["fail", "drop"]
"""The treatment of a row that the server refuses, such as one without a key."""
Nulls: TypeAlias = Literal["omit", "write"]
"""The two ways to write a null column: left out of the document, or written as null."""
NewFields: TypeAlias = Literal["ignore", "fail", "rescue"]
"""The treatment of a field of a document that the schema lacks: it is left out, the document does not fit, or it is in
the column `_rescued`."""
SnapshotOf: TypeAlias = Literal["first-read", "load"]
"""The choice of a DataFrame whose snapshot has ended: a new one with the next action, or never (rule Q8)."""
OnDelete: TypeAlias = Literal["delete", "ignore", "fail"]
"""The treatment of rows whose `_op` is delete or expire."""
Durability: TypeAlias = Literal["fsync", "buffered", "replicated"]
"""The durability at which a write is acknowledged (rule P5)."""


@dataclass(frozen=True, slots=True)
class Connecting:
    """The connection to the server, from the driver and from every executor."""

    server: str = DEFAULT_SERVER
    tls_ca: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_server_name: str | None = None
    token_file: str | None = None
    """The path of a file with the token to show, on the driver and on every executor."""
    timeout_micros: int = 30_000_000
    """Bound of a call that has one answer."""
    connect_timeout_micros: int = 5_000_000
    retry_for_micros: int = 60_000_000
    """A call is repeated for this long while the server cannot be reached."""

    @property
    def tls(self) -> bool:
        """True if any of the tls options is given."""
        return any((self.tls_ca, self.tls_certificate, self.tls_key, self.tls_server_name))


@dataclass(frozen=True, slots=True)
class Reading:
    """Options of reading, in a batch or as a stream."""

    connecting: Connecting
    topic: str
    """Empty if there are several."""
    topics: tuple[str, ...] = ()
    """The topics, if they are listed."""
    cell: str = ""
    """The topics of this cell alone count. Empty: no cells are told apart."""
    topic_pattern: str | None = None
    """The topics whose whole names match this regular expression; in a stream also those that come later."""
    filter: str = ""
    parameters: Parameters | None = None
    """The values of the names in `filter`."""
    snapshot: SnapshotOf = "first-read"
    """Batch: the instant that a DataFrame shows."""
    export: str | None = None
    """Batch: name of an export that the program has opened itself, or `load()` for `snapshot` = "load". None: the read
    opens one."""
    push_filters: bool | None = None
    """Batch: push Spark's filters, if Spark's setting is on. None: where this Spark plans each use of a DataFrame by
    itself."""
    partitions: int = 0
    """Approximate number of parts. 0: the server chooses (batch), or by the entries of a micro-batch (stream)."""
    infer_records: int = 1_000
    """Number of records in the sample for inferring a schema."""
    metadata: MetadataColumns = "true"
    """The metadata columns of an inferred schema. "false": none, and no column is filled with metadata."""
    columns: tuple[str, ...] = ()
    """The columns of an inferred schema, in this order. Empty: all."""
    json_schema: str | None = None
    """Makes the schema: a JSON Schema, the path of a file with one, or `topic:NAME/KEY`. None: the sample."""
    new_fields: NewFields = "ignore"
    payload: PayloadForm | None = None
    """None: columns for json topics, binary for others."""
    mode: ParseMode = "FAILFAST"
    lease_micros: int = 0
    """Lease of an export; 0: the server's default."""
    batch_size: int = 0
    """Records per batch; 0: the server's default."""
    starting_from: str | datetime | Mapping[str, str] = "latest"
    """Stream: "earliest", "latest", a time, or a bookmark; of several cells the bookmark of each, by its name."""
    max_records_per_trigger: int = 0
    """Stream: maximum number of journal entries in a micro-batch. 0: no limit."""
    max_bytes_per_trigger: int = 0
    """Stream: the same limit in bytes."""
    fail_on_data_loss: bool = True
    pin_name: str | None = None
    """Stream: the durable subscription that keeps the journal for it. None: a random name, which the checkpoint
    keeps."""
    pin_lease_micros: int = 3_600_000_000
    """The pin is removed if the query has not renewed it for this long."""
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The names of the options that are given."""

    @property
    def is_fixed(self) -> bool:
        """Batch: whether the DataFrame shows one export for ever (rule Q8)."""
        return self.export is not None or self.snapshot == "load"

    @property
    def several(self) -> bool:
        """True if there may be several topics."""
        return bool(self.topics) or self.topic_pattern is not None

    @property
    def named(self) -> str:
        """The topic or topics, as messages name them."""
        where = f" in the cell {self.cell}" if self.cell else ""
        if self.topic_pattern is not None:
            return f"topics {self.topic_pattern}{where}"
        return f"topics {', '.join(self.topics)}{where}" if self.topics else f"topic {self.topic}"


@dataclass(frozen=True, slots=True)
class Writing:
    """Options of writing, in a batch or as a stream."""

    connecting: Connecting
    topic: str
    """Empty if a column names it."""
    topic_column: str | None = None
    """The column with the topic of each row."""
    mode: WriteMode = "publish"
    ttl: str | None = None
    """Lifetime of every row: a duration, or "never"; None: the topic's (rule L2)."""
    ttl_column: str | None = None
    expire_time_column: str | None = None
    key_column: str | None = None
    payload: PayloadForm | None = None
    """The source of a document: the columns, or the one column that has it. None: the columns."""
    on_delete: OnDelete = "delete"
    on_bad_row: BadRows = "fail"
    nulls: Nulls = "omit"
    durability: Durability | None = None
    batch_size: int = 0
    """Rows per request; 0: the client's default."""
    lease_micros: int = 0
    """Overwrite: lease of the load. 0: the server's default."""
    writer_id: str | None = None
    """Stream: names its publishers. A query that continues another one has the same id. None: the id that Spark keeps
    in the checkpoint."""
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The names of the options that are given."""

    @property
    def named(self) -> str:
        """The topic or topics, as messages name them."""
        return self.topic or f"the topics of column {self.topic_column}"
