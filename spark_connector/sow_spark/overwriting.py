"""Batch overwrite: the rows of a DataFrame become the topic's content, all or nothing.

The tasks stage their rows invisibly in a load. The commit of the job names the attempts that count, and the server then
applies them by itself. Guarantees:

    [1]  Before the commit the topic stays as it was. A job that fails before the commit leaves it so. Its staged rows
         go with the load, which is aborted or ends with its lease.
    [2]  Of the attempts at a partition only the one that Spark has accepted counts, with exactly the rows that it
         staged.
    [3]  `save()` returns when the server has applied everything. If the server is unreachable for longer than
         `retryFor`, `save()` fails and says so, and the load continues at the server.
    [4]  Records that others change between the beginning and the end of the job keep those changes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sow_client import Client, LoadPart, NotFound, SowError
from sow_spark.connection import connect, kept, retried
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
    """The rows that a task has staged."""

    attempt: int = 0


class OverwritingWriter(DataSourceArrowWriter):
    """The writer of an overwrite. It is made on the driver, pickled to tasks, and used on the driver again for the
    commit."""

    def __init__(self, writing: Writing, schema: StructType) -> None:
        """Opens the load. Raises SowSourceError for a fault in options, schema or topic."""
        if writing.mode == "delta":
            raise option_error(
                "mode", "delta and overwrite exclude each other: a replaced record is no base for a merge"
            )
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
            self._writing = replace(writing, connecting=kept(writing.connecting, client, writing.topic))
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
        ttl = plan.ttl(writing)
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
        """Makes the staged rows the topic's content, and returns once they are."""
        writing = self._writing
        silent = [str(index) for index, message in enumerate(messages) if not isinstance(message, Staged)]
        if silent:
            raise SowSourceError(
                "INPUT_CUT",
                f"partitions {', '.join(silent[:10])} of {len(messages)} did not report their staged rows for "
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
        """The job has failed: drops the staged rows, unless they are committed already."""
        log_summary(self._writing, "aborted overwrite", messages)
        try:
            with connect(self._writing.connecting) as client:
                client.abort_load(self._load_id)
        except SowError as error:
            # LOAD_COMMITTED: the load is committed, and only the answer was lost. Otherwise its lease ends it.
            log.warning("load %s of %s was not aborted: %s", self._load_id, self._writing.topic, error)

    @contextmanager
    def _renewed(self, client: Client) -> Iterator[None]:
        """Renews the lease inside the block, also while no rows come. Each running task does this."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self._lease.total_seconds() / RENEWALS_PER_LEASE):
                try:
                    client.renew_load(self._load_id)
                except NotFound:
                    return  # staging raises the error
                except SowError as error:
                    log.warning("load %s was not renewed: %s", self._load_id, error)

        thread = threading.Thread(target=renew, name="sow-renew-load", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
