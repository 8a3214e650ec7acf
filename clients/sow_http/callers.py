"""The clients of the door: one for each token, at most `CALLERS_MAX`.

[1]  A call goes out with the token of its own request, and with no other.
[2]  A client in use is not closed; of the others, the one that was used longest ago makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from starlette.requests import Request

from sow_client import AsyncClient
from sow_http.problems import Refused

CALLERS_MAX: Final = 256
TOKEN_BYTES_MAX: Final = 16_384
Connect: TypeAlias = Callable[[str | None], AsyncClient]


@dataclass(slots=True)
class _Caller:
    client: AsyncClient
    uses: int = 0


class Callers:
    """Owns the clients."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._callers: OrderedDict[str | None, _Caller] = OrderedDict()

    @asynccontextmanager
    async def client(self, token: str | None) -> AsyncIterator[AsyncClient]:
        """The client that shows this token ([1])."""
        # Others may take the room while it is made.
        while token not in self._callers and len(self._callers) >= CALLERS_MAX:
            await self._make_room()
        if token not in self._callers:
            self._callers[token] = _Caller(self._connect(token))
        caller = self._callers[token]
        self._callers.move_to_end(token)
        caller.uses += 1
        try:
            yield caller.client
        finally:
            caller.uses -= 1

    async def _make_room(self) -> None:
        idle = [token for token, caller in self._callers.items() if not caller.uses]
        if not idle:
            raise Refused(503, f"{CALLERS_MAX} callers are at work; try again in a while", reason="OVERLOADED")
        await self._callers.pop(idle[0]).client.close()

    async def close(self) -> None:
        """Closes all clients."""
        for caller in self._callers.values():
            await caller.client.close()


def token_of(request: Request) -> str | None:
    """The bearer token of a request; None: it has none. Raises Refused for anything else in `Authorization`."""
    given = request.headers.getlist("authorization")
    if not given:
        return None
    scheme, _, token = given[0].partition(" ")
    token = token.strip()
    if len(given) > 1 or scheme.lower() != "bearer" or not token or len(token) > TOKEN_BYTES_MAX:
        raise Refused(401, "Authorization: is not Bearer and a token", reason="UNAUTHENTICATED", field="Authorization")
    return token
