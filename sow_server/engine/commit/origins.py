"""The names of the instances that wrote records: a record's `origin` is an index into them (rule K7).

[1]  A name keeps its number for the life of the data. New names are stored with the commit that first uses them.
[2]  New or restored data get a new number, and so does an instance with another name. So its earlier records, under the
     same name, differ from the records that it writes now.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from sow_server.engine.commit.draft import Draft
from sow_server.engine.disk.layout import INSTANCE_KEY
from sow_server.engine.disk.rocks import META, Rocks
from sow_server.engine.values.errors import Reason, StoreError

ORIGINS_MAX: Final = 2**16
"""Names of instances that wrote records: a record has two bytes for the number of one."""
OWN_MAX: Final = 1_024
"""The part of these names that is left for this instance. It needs one more after each restore."""


class NewOrigins:
    """The names in a draft that adds some; empty in others."""

    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()


class Origins:
    """Owns the names. Changed by the writer's thread, after the commit that stored them; any thread reads them."""

    def __init__(self, rocks: Rocks, names: tuple[str, ...], own: int) -> None:
        self._rocks = rocks
        self.names = names
        """The names by their numbers. The tuple is replaced, never changed."""
        self.own: Final = own
        """The number of this instance for its writes with these data."""

    def names_in(self, draft: Draft) -> tuple[str, ...]:
        """The names by their numbers, as a commit leaves them."""
        return draft.part(NewOrigins).names or self.names

    def unknown_in(self, draft: Draft, names: Sequence[str]) -> int:
        """How many of the names of another instance `stage` would add."""
        known = [name for number, name in enumerate(self.names_in(draft)) if number != self.own]
        return len(set(names).difference(known))

    def stage(self, draft: Draft, names: Sequence[str]) -> list[int]:
        """The numbers of the instances that another one names; new names are stored with the commit. This instance's
        own name means its writes with earlier data ([2]), and has a separate number."""
        known = list(self.names_in(draft))
        numbers = {name: number for number, name in enumerate(known) if number != self.own}
        new = [name for name in dict.fromkeys(names) if name not in numbers]
        if new:
            row = self._rocks.get(META, INSTANCE_KEY)
            assert row is not None, "opening has written it"
            if len(known) + len(new) > ORIGINS_MAX - OWN_MAX:
                raise StoreError(
                    Reason.INTERNAL, f"there is room for {ORIGINS_MAX - OWN_MAX} origins, and {new[0]} is one more"
                )
            numbers |= {name: len(known) + index for index, name in enumerate(new)}
            after = draft.part(NewOrigins).names = (*known, *new)
            draft.batch.puts[META][INSTANCE_KEY] = json.dumps({**json.loads(row), "origins": after}).encode()
            draft.on_commit.append(lambda: self._know(after))
        return [numbers[name] for name in names]

    def _know(self, names: tuple[str, ...]) -> None:
        self.names = names
