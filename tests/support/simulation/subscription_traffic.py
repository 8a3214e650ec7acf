"""Random changes to a store with subscribers, random subscriptions, and other work in between."""

from __future__ import annotations

import enum
from typing import NamedTuple

from hypothesis import strategies as st

from sow_server.engine.values.model import ABSENT, Expiration, Lifetime, LifetimeKind, TopicSettings
from tests.support.oracles.subscription_oracle import KEYED
from tests.support.stores.stores import MINUTE, SECOND

GIVEN = TopicSettings(expiration=Expiration.ENABLED)
TOPICS = {"keyed": KEYED, "given": GIVEN, "quiet": GIVEN._replace(journal=False)}
KEYS = ["a", "b", "c"]
FILTERS = [
    "",
    "/n > 2",
    "/n = 1",
    "/n IN (1, 2, 3)",
    "/s = 'x' AND /n < 4",
    "/s = 'x' OR /s = 'y'",
    "/m IS NULL",
    "/m/deep = 1",
    "@key = 'a'",
    "/k = 'b'",
    "NOT /n = 2",
    "/n > 100",
    "@expire_time IS NOT NULL",
]
PATTERNS = ["keyed|given", "given|new.*", ".*", "quiet|keyed"]

documents = st.fixed_dictionaries(
    {"n": st.integers(0, 4)},
    optional={
        "s": st.sampled_from(["x", "y"]),
        "m": st.one_of(st.none(), st.fixed_dictionaries({"deep": st.integers(0, 1)})),
    },
)
spans = st.sampled_from([1, 1000, SECOND, 5 * SECOND, MINUTE])
lifetimes = st.one_of(
    st.just(ABSENT),
    st.just(ABSENT),
    spans.map(lambda micros: Lifetime(LifetimeKind.TTL, micros)),
    st.just(Lifetime(LifetimeKind.TTL, 0)),
)
topics = st.sampled_from(["keyed", "keyed", "given", "given", "quiet", "new1", "new2"])
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)


class Publishing(NamedTuple):
    topic: str
    records: list[tuple[str, dict[str, object]]]
    lifetime: Lifetime
    atomic: bool
    buffered: bool


class Touching(NamedTuple):
    topic: str
    keys: list[str]
    lifetime: Lifetime


class Deleting(NamedTuple):
    topic: str
    keys: list[str]


class Ticking(NamedTuple):
    micros: int


class Reading(NamedTuple):
    """Subscribers take at most so many frames; the slow ones only when all of them do."""

    frames: int
    slow_too: bool


class Rescuing(NamedTuple):
    """A record is touched just before it is due, and time goes on before anybody hears of it."""

    topic: str
    key: str
    document: dict[str, object]


class Flashing(NamedTuple):
    """A record is there for no time at all, as conflating subscribers see it."""

    topic: str
    key: str
    document: dict[str, object]


class Other(enum.Enum):
    LOOP_TURNS = enum.auto()
    EVERYTHING_IS_DISPATCHED = enum.auto()
    SWEEP = enum.auto()


Operation = Publishing | Touching | Deleting | Rescuing | Flashing | Ticking | Reading | Other
publishes = st.builds(
    Publishing,
    topics,
    st.lists(st.tuples(st.sampled_from(KEYS), documents), min_size=1, max_size=6),
    lifetimes,
    st.sampled_from([False, False, True]),
    st.booleans(),
)
touches = st.builds(Touching, topics, some_keys, lifetimes)
deletes = st.builds(Deleting, topics, some_keys)
rescues = st.builds(Rescuing, topics, st.sampled_from(KEYS), documents)
flashes = st.builds(Flashing, topics, st.sampled_from(KEYS), documents)
others = st.one_of(
    spans.map(Ticking), st.builds(Reading, st.sampled_from([1, 2, 10_000]), st.booleans()), st.sampled_from(list(Other))
)
asks = st.fixed_dictionaries(
    {
        "where": st.sampled_from([*TOPICS, *TOPICS, *PATTERNS, "new1"]),
        "text": st.sampled_from(FILTERS),
        "kind": st.sampled_from(["plain", "oof", "oof", "changes", "delta", "delta oof"]),
        "empty_deltas": st.booleans(),
        "begin": st.sampled_from(["now", "sow", "sow", "sow", "earliest", "time"]),
        "batch_size": st.sampled_from([1, 2, 1000]),
        "conflation": st.sampled_from([0, 0, SECOND]),
        "slow": st.booleans(),
    }
)
