"""Sends changes of durable subscriptions to the writer, in batches. On the dispatcher's thread.

[1]  One commit takes all changes that arrived while the last one was written.
[2]  A refused change does not hold up the others of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from sow_server.engine.durables import DurableEditor
from sow_server.engine.durables.commits import DurableCommits
from sow_server.engine.pending import Pending
from sow_server.engine.values.errors import StoreError

log = structlog.get_logger(__name__)

T = TypeVar("T")


class _DurableChange(NamedTuple):
    """One change of durables that waits for the writer."""

    run: Callable[[DurableEditor], object]
    pending: Pending[Any]
    """The result of `run`."""


class DurableChanges:
    """Owns the changes that wait for the writer."""

    def __init__(self, durable_commits: DurableCommits) -> None:
        self._durable_commits = durable_commits
        self._waiting: list[_DurableChange] = []
        self._writing = False

    def submit(self, run: Callable[[DurableEditor], T]) -> Pending[T]:
        """Queues a change. Raises StoreError when the writer takes no changes."""
        pending: Pending[T] = Pending()
        self._waiting.append(_DurableChange(run, pending))
        if not self._writing:
            try:
                self._write()
            except StoreError:
                del self._waiting[-1:]
                raise
        return pending

    def submit_quietly(self, run: Callable[[DurableEditor], T]) -> Pending[T]:
        """As `submit`, but drops the change, without an answer, while the store is stopping, failed or overloaded."""
        try:
            return self.submit(run)
        except StoreError as error:
            log.debug("durable_change_skipped", reason=error.reason.name)
            return Pending()

    def _write(self) -> None:
        """Sends the waiting changes as one batch [1]."""
        batch = list(self._waiting)

        def change(durables: DurableEditor) -> list[object]:
            results: list[object] = []
            for one in batch:
                try:
                    results.append(one.run(durables))
                except StoreError as error:
                    results.append(error)
            return results

        self._durable_commits.change(change).then(partial(self._written, batch))
        del self._waiting[: len(batch)]
        self._writing = True

    def _written(self, batch: list[_DurableChange], results: list[object] | StoreError) -> None:
        self._writing = False
        if self._waiting:
            try:
                self._write()
            except StoreError as error:
                left, self._waiting = self._waiting, []
                for one in left:
                    one.pending.settle(error)
        answers = [results] * len(batch) if isinstance(results, StoreError) else results
        for one, answer in zip(batch, answers, strict=True):
            try:
                one.pending.settle(answer)
            except Exception:
                log.exception("answer_failed")  # the error of one caller; the others still get their answers
