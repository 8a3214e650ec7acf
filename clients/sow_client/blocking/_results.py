# Generated from aio/_results.py by clients/generate_blocking.py. Change that file, then run `make client`.
"""Live results: the list that a query finds, kept right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sow_client import _statuses
from sow_client._grouping import Expressions
from sow_client._live_result import ResultCore, result_request
from sow_client._parameters import Parameters
from sow_client._records import Record
from sow_client._subscription import OpenSubscription, Subscription


class LiveResult(Subscription):
    """The first records of a topic in an order, kept right: `list` has them, and iterating gives their changes. Made by
    `Client.live_result`, and used by one thread.

    The list changes when the next changes are asked for, and only then: it is the result of the query at `bookmark`.
    When the connection breaks or the server restarts, it calls again, also at another instance, and gives the
    differences to the new list.

    Rules: S10, S11, S13, S14.
    """

    _what = "live result"

    def __init__(self, core: ResultCore, open_call: OpenSubscription) -> None:
        super().__init__(core, open_call)
        self._result = core

    def open(self) -> None:
        """Returns once the list is there; `live_result` has called it already."""
        self._check_process()
        while self._result.reached is None:
            if not self._advance():
                raise _statuses.closed("live result")

    def list(self) -> Sequence[Record]:
        """The records in their order, as of `bookmark`."""
        return [*self._result.rows]

    def change(
        self,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        order_by: str | Iterable[str] | None = None,
        top_n: int | None = None,
        skip_n: int = 0,
        group_by: Expressions | None = None,
        aggregate: Expressions | None = None,
        having: str | None = None,
    ) -> None:
        """From now on it is the list of another query of the topic, which is given as a whole. Returns once the list is
        there.

        Iterating then gives the differences between the two lists, after what was left of the changes before. A query
        that the server refuses changes nothing, and raises its error. The other arguments of `live_result` stay.

        Rule: S14.
        """
        self._check_process()
        wanted = result_request(
            self._result.topic,
            filter,
            parameters,
            order_by=order_by,
            top_n=top_n,
            skip_n=skip_n,
            group_by=group_by,
            aggregate=aggregate,
            having=having,
            conflation=None,
            progress=None,
            select=None,
            exclude=None,
            batch_size=1,  # all but the query stays
        )
        self._result.change(wanted)
        self.call_again()
        while self._result.changing:
            if not self._advance():
                raise _statuses.closed("live result")
        if (refused := self._result.refused) is not None:
            raise refused

    @property
    def absent_fields(self) -> tuple[str, ...]:
        """Fields of the filter and of the order in which no record that was read for the last snapshot has a value:
        perhaps they are mistyped. Rule: Q10."""
        return self._result.absent_fields
