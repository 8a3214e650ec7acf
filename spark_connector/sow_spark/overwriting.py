"""Batch overwrite: the rows of a DataFrame become the topic's content, all or nothing.

The tasks stage their rows in a load, where nobody sees them; the commit of the job names the attempts that count, and
the server does the rest by itself. Guarantees:

V1  Until the commit the topic is as it was; a job that fails before it leaves it so, and what is staged goes with the
    load: aborted, or when its lease ends.
V2  Of the attempts at a partition only the one that Spark has accepted counts, with exactly the rows that it staged.
V3  `save()` returns when the server has applied everything. Should it lose sight of the server for longer than
    `retryFor`, it fails and says so, and the load goes on.
V4  Records that others change between the begin of the job and its end stay as those have left them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sow_client import NEVER, Client, LoadPart, NotFound, SowError
from sow_spark.connection import connect, retried
from sow_spark.errors import SowSourceError, option_error, translated
from sow_spark.options import Writing
from sow_spark.rows import BadRow, Puts, look_up_topic, plan_rows
from sow_spark.task_input import require_whole_input
from sow_spark.writing import BadRows, HandedOver, Written, log_summary, task_context

if TYPE_CHECKING:
    import pyarrow as pa

RENEWALS_PER_LEASE: Final = 3
PROGRESS_LOGGED_ROWS: Final = 1_000_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Staged(Written):
    """What a task has staged."""

    attempt: int = 0


class OverwritingWriter(DataSourceArrowWriter):
    """The writer of an overwrite. Made on the driver, pickled to tasks, and back on the driver for the commit."""

    def __init__(self, writing: Writing, schema: StructType) -> None:
        """Opens the load. Raises SowSourceError for what is wrong with options, schema or topic."""
        if writing.mode == "delta":
            raise option_error("mode", "delta and overwrite exclude each other: what is replaced is no base of a merge")
        if "_op" in schema.names:
            raise SowSourceError(
                "SCHEMA_UNSUPPORTED",
                "column _op: an overwrite takes records, not changes",
                "keep the last put of each key, and leave the column out",
            )
        with translated(f"overwriting {writing.topic}"), connect(writing.connecting) as client:
            topic = retried(writing.connecting, lambda: look_up_topic(client, writing, schema))
            self._plan = plan_rows(schema, writing, topic)
            lease = timedelta(microseconds=writing.lease_micros) if writing.lease_micros else None
            load = client.open_load(writing.topic, lease=lease)
        self._writing = writing
        self._load_id = load.id
        self._lease = load.lease

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stages the rows of one partition."""
        writing, plan = self._writing, self._plan
        task = task_context()
        partition, attempt = task.partitionId(), task.taskAttemptId()
        bad = BadRows()
        handed_over = HandedOver()
        rows = refusals_seen = 0
        ttl = NEVER if writing.ttl == "never" else writing.ttl
        with translated(f"staging partition {partition} for {writing.topic}"), connect(writing.connecting) as client:
            with (
                self._renewed(client),
                client.stage_load(
                    self._load_id, partition, attempt, retry_for=writing.connecting.retry_for_micros / 1e6
                ) as stager,
            ):
                for batch in iterator:
                    faults: list[BadRow] = []
                    for step in plan.steps(batch, rows, faults):
                        assert isinstance(step, Puts), "there is no column _op"
                        handed_over.add(step)
                        stager.stage(
                            step.payloads,
                            keys=step.keys,
                            lifetime=ttl,
                            lifetime_kinds=step.lifetime_kinds,
                            lifetime_micros=step.lifetime_micros,
                        )
                    bad.add(faults)
                    rows += batch.num_rows
                    # Refusals are read before the counts: both grow in the stager's thread.
                    refusals = stager.refusals
                    bad.add(handed_over.refused(refusals[refusals_seen:]))
                    refusals_seen = len(refusals)
                    handed_over.settled(stager.staged)
                    bad.check(writing, partition, last=False)
                require_whole_input()
                stager.flush()
                bad.add(handed_over.refused(stager.refusals[refusals_seen:]))
                bad.check(writing, partition, last=True)
                return Staged(partition, stager.staged, bad.count, tuple(bad.samples), attempt=attempt)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Makes what was staged the topic's content, and returns once it is."""
        writing = self._writing
        silent = [str(index) for index, message in enumerate(messages) if not isinstance(message, Staged)]
        if silent:
            raise SowSourceError(
                "INPUT_CUT",
                f"partitions {', '.join(silent[:10])} of {len(messages)} did not tell what they staged for "
                f"{writing.topic}: nothing is replaced",
                "run the write again",
            )
        parts = [
            LoadPart(message.partition, message.attempt, message.rows)
            for message in messages
            if isinstance(message, Staged)
        ]
        log_summary(writing, "overwrite", messages)
        told = 0
        with translated(f"committing load {self._load_id} of {writing.topic}"), connect(writing.connecting) as client:
            retry_for = writing.connecting.retry_for_micros / 1e6
            for progress in client.commit_load(self._load_id, parts, retry_for=retry_for):
                figures = progress.figures
                if progress.phase == "done" or figures.applied >= told + PROGRESS_LOGGED_ROWS:
                    told = figures.applied
                    log.info(
                        "overwrite of %s: %s; %d of %d rows applied, %d superseded, %d repeated, %d records deleted",
                        writing.topic,
                        progress.phase,
                        figures.applied,
                        figures.staged,
                        figures.superseded,
                        figures.repeated,
                        figures.deleted,
                    )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The job has failed: drops what was staged, unless it is committed already."""
        log_summary(self._writing, "aborted overwrite", messages)
        try:
            with connect(self._writing.connecting) as client:
                client.abort_load(self._load_id)
        except SowError as error:
            # LOAD_COMMITTED: it was the commit's answer that was lost. Otherwise the lease ends it.
            log.warning("load %s of %s was not aborted: %s", self._load_id, self._writing.topic, error)

    @contextmanager
    def _renewed(self, client: Client) -> Iterator[None]:
        """Renews the lease meanwhile, also while no rows come; each task does, as long as one runs."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self._lease.total_seconds() / RENEWALS_PER_LEASE):
                try:
                    client.renew_load(self._load_id)
                except NotFound:
                    return  # staging says so
                except SowError as error:
                    log.warning("load %s was not renewed: %s", self._load_id, error)

        thread = threading.Thread(target=renew, name="sow-renew-load", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
