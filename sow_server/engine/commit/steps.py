"""The protocol of a change that is no request: it stages itself on a draft, and answers once the draft is committed.

[1]  `stage` runs on the writer's thread. It changes nothing but the draft: a StoreError that it raises refuses the
     change, and a draft that is dropped has changed nothing.
[2]  `committed` runs once after the commit, on the writer's thread and under the cut lock: no cut falls between the
     commit and its effects in memory. Its result is the answer.
[3]  A commit that stalls is refused after a while, and the same step may be queued again. So `stage` begins anew
     each time, whatever an earlier call has left in the step.
"""

from __future__ import annotations

import enum
from typing import Generic, Protocol, TypeVar

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Step(Protocol[T_co]):
    """A change that one commit makes."""

    def stage(self, draft: Draft) -> None:
        """Stages the change. Raises StoreError to refuse it."""

    def committed(self) -> T_co:
        """Applies the effects of the commit in memory; returns the answer."""


class TopicStep(Step[object], Protocol):
    """The step that creates a topic."""

    @property
    def topic(self) -> Topic:
        """The topic as it was staged last; it exists only once the step is committed."""


class Staged(enum.Enum):
    """How far a round has come."""

    DONE = "done"
    """The whole change is staged."""
    AGAIN = "again"
    """This draft has to be committed first; then the change is staged anew, on another draft."""


class StepInRounds(Protocol[T_co]):
    """A change that may need commits before its own."""

    def stage(self, draft: Draft) -> Staged:
        """Stages the change, or a part that has to be committed before it. Raises StoreError to refuse it."""

    def committed(self) -> T_co:
        """As `Step.committed`; only after the commit of a round that was DONE."""


class Round(Generic[T]):
    """One round of a change that may need several, as a step. Its answer is `Staged.AGAIN` while there are more."""

    __slots__ = ("_staged", "_step")

    def __init__(self, step: StepInRounds[T]) -> None:
        self._step = step
        self._staged = Staged.AGAIN

    def stage(self, draft: Draft) -> None:
        """Stages the round."""
        self._staged = self._step.stage(draft)

    def committed(self) -> T | Staged:
        """The answer of the change, or that there are more rounds."""
        return self._step.committed() if self._staged is Staged.DONE else Staged.AGAIN


class Nothing:
    """A step that changes nothing; its commit syncs all earlier writes."""

    def stage(self, draft: Draft) -> None:
        """Stages nothing."""

    def committed(self) -> None:
        """Has no effects."""
