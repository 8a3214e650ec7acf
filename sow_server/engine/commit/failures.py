"""The answers for requests that fail in the writer: exceptions from below as StoreErrors."""

from __future__ import annotations

import structlog

from sow_server.engine.commit.requests import Job
from sow_server.engine.values.database import Damaged, DiskFull, RocksError, Stalled
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS

log = structlog.get_logger(__name__)


def broken_stream(job: Job) -> StoreError:
    """The answer to a request behind a refused one of its stream (rules P6, P7)."""
    return StoreError(
        Reason.STREAM_BROKEN,
        "an earlier request of this stream was refused, so nothing after it is applied",
        applied=job.outcome.applied,
    )


def as_store_error(error: Exception) -> StoreError:
    """The StoreError that tells a caller of an exception."""
    match error:
        case StoreError():
            return error
        case DiskFull():
            return StoreError(Reason.DISK_FULL, f"the disk is full, writes have stopped: {error}")
        case Damaged():
            return StoreError(Reason.DATA_DAMAGED, f"stored data is damaged: {error}")
        case Stalled():
            return StoreError(Reason.WRITE_STALLED, f"the disk cannot keep up: {error}", retry_after_micros=MICROS)
        case RocksError():
            return StoreError(Reason.STORE_FAILED, f"a commit failed, writes have stopped: {error}")
        case _:
            log.error("unexpected", exc_info=error)
            return StoreError(Reason.INTERNAL, f"internal error: {type(error).__name__}")
