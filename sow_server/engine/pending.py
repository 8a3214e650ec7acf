"""One answer of the writer, as the caller has it who asked for a change: see `sow_peering.answers`.

[1]  It is answered on the thread that owns the answers (`Writer.start`), or, without the writer's thread, in the one
     that drives the writer.
[2]  A change is committed whether or not anybody waits for its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sow_peering.answers import Answer
from sow_server.engine.values.errors import StoreError

T = TypeVar("T")
U = TypeVar("U")


class Pending(Answer[T, StoreError]):
    """`await` it for the answer, or for the StoreError that refused the change. `then` is for those who must hear of
    both in the turn of the answer, before anybody else has one."""

    __slots__ = ()

    def map(self, change: Callable[[T], U]) -> Pending[U]:
        """The answer that `change` makes of this one, in its turn. A refusal stays as it is, and a StoreError that
        `change` raises is one."""
        mapped: Pending[U] = Pending()

        def answered(answer: T | StoreError) -> None:
            if isinstance(answer, StoreError):
                mapped.settle(answer)
                return
            try:
                changed = change(answer)
            except StoreError as error:
                mapped.settle(error)
            else:
                mapped.settle(changed)

        self.then(answered)
        return mapped


def answered(answer: T | StoreError) -> Pending[T]:
    """The answer of a change that there was no need for, or that was refused at once."""
    pending: Pending[T] = Pending()
    pending.settle(answer)
    return pending
