"""The delay before the next attempt: it doubles up to a bound, with jitter, so that peers do not come back all at
once."""

from __future__ import annotations

import random
from typing import Final

from sow.v1 import types_pb2
from sow_replication.options import NodeOptions
from sow_replication.ports import Reason

OPERATORS: Final = frozenset(
    {
        types_pb2.ERROR_REASON_PEER_NOT_ACCEPTED,
        types_pb2.ERROR_REASON_PEER_NOT_FOUND,
        types_pb2.ERROR_REASON_PEER_UNAUTHENTICATED,
        types_pb2.ERROR_REASON_PEER_IS_SELF,
        types_pb2.ERROR_REASON_INSTANCE_NAME_CLASH,
        types_pb2.ERROR_REASON_PEER_OTHER_CLUSTER,
        types_pb2.ERROR_REASON_PROTOCOL_MISMATCH,
        types_pb2.ERROR_REASON_INVALID_ARGUMENT,
        types_pb2.ERROR_REASON_DATA_DAMAGED,
    }
)
"""Reasons that only an operator can resolve."""


class Backoff:
    """The attempts at one peer."""

    def __init__(self, options: NodeOptions, draw: random.Random) -> None:
        self._options = options
        self._draw = draw
        self._next = options.backoff_min_micros

    def succeeded(self) -> None:
        """The next failure counts as the first one."""
        self._next = self._options.backoff_min_micros

    def failed(self, reason: Reason) -> int:
        """The delay in microseconds: between half and all of the current one."""
        if reason in OPERATORS:
            delay = self._options.backoff_operator_micros
        elif reason == types_pb2.ERROR_REASON_RESEED_PENDING:
            delay = 10 * self._options.backoff_min_micros  # it passes as soon as the other direction is complete
        else:
            delay = self._next
            self._next = min(2 * self._next, self._options.backoff_max_micros)
        return self._draw.randint(delay // 2, delay)
