"""The durable subscriptions and policies of a `FakeClient`."""

from dataclasses import replace
from datetime import timedelta

from sow_client import (
    Browsed,
    Durable,
    DurableFigures,
    DurableSettings,
    NotFound,
    Policy,
    Rewound,
    SowError,
)
from sow_client._reports import PolicyTargetName
from tests.support.fakes.fake_results import NOW


class FakeRetention:
    """Owns the durable subscriptions and policies, and the list of all calls of the client."""

    def __init__(self) -> None:
        self.fails_with: SowError | None = None
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.kept: dict[tuple[str, str], Durable] = {}
        """Durable subscriptions by topic and name."""
        self.browsed = Browsed((), "4567.4", complete=True)
        """The unacknowledged changes of any of them."""
        self.set_policies: dict[tuple[str, bool], Policy] = {}
        """By name, and whether it is the operator's."""

    def keep(
        self,
        topic: str,
        name: str,
        *,
        figures: DurableFigures | None = None,
        filter: str = "",  # noqa: A002 - likewise
        pin: bool = False,
        owner: str = "",
        reader: str = "",
    ) -> None:
        """A durable subscription as a test wants it."""
        settings = DurableSettings(retain_time="90m", retain_bytes=1_500)
        used = NOW + timedelta(seconds=5)
        one = Durable(topic, name, filter, "4567.4", "4567.1", False, NOW, used, settings, figures)
        self.kept[topic, name] = replace(one, pin=pin, owner=owner, reader=reader)

    def durables(self, topic: str | None = None, *, with_figures: bool = False) -> list[Durable]:
        self._called("durables", topic=topic, with_figures=with_figures)
        kept = [one for one in self.kept.values() if topic in (None, one.topic)]
        return kept if with_figures else [replace(one, figures=None) for one in kept]

    def durable_browse(self, topic: str, name: str, *, entries_max: int = 100, after: str | None = None) -> Browsed:
        self._called("durable_browse", topic=topic, name=name, entries_max=entries_max, after=after)
        self._durable(topic, name)
        return self.browsed

    def describe_durable(self, topic: str, name: str, *, exact: bool = False) -> Durable:
        self._called("describe_durable", topic=topic, name=name, exact=exact)
        return self._durable(topic, name)

    def rewind(self, topic: str, name: str, to: object, *, force: bool = False) -> Rewound:
        self._called("rewind", topic=topic, name=name, to=to, force=force)
        self._durable(topic, name)
        return Rewound("4567.1", 7)

    def delete_durable(self, topic: str, name: str, *, force: bool = False) -> None:
        self._called("delete_durable", topic=topic, name=name, force=force)
        self._durable(topic, name)
        del self.kept[topic, name]

    def clear_backlog(self, topic: str, name: str | None = None) -> int:
        self._called("clear_backlog", topic=topic, name=name)
        return 7

    def set_policy(
        self,
        name: str,
        pattern: str,
        *,
        topics: dict[str, object] | None = None,
        durables: dict[str, object] | None = None,
        priority: int = 0,
        operator: bool = False,
    ) -> Policy:
        self._called("set_policy", name=name, pattern=pattern, topics=topics, durables=durables, priority=priority)
        settings = topics if topics is not None else durables
        assert settings is not None
        said = {key: value for key, value in settings.items() if isinstance(value, str | int)}
        target: PolicyTargetName = "topics" if topics is not None else "durables"
        made = self.set_policies[name, operator] = Policy(name, pattern, priority, target, operator, said, 2)
        return made

    def get_policy(self, name: str, *, operator: bool = False) -> Policy:
        self._called("get_policy", name=name, operator=operator)
        return self._policy(name, operator)

    def policies(self) -> list[Policy]:
        self._called("policies")
        return list(self.set_policies.values())

    def delete_policy(self, name: str, *, operator: bool = False) -> None:
        self._called("delete_policy", name=name, operator=operator)
        self._policy(name, operator)
        del self.set_policies[name, operator]

    def _durable(self, topic: str, name: str) -> Durable:
        if (topic, name) not in self.kept:
            raise NotFound(f"there is no durable subscription {name!r}", reason="DURABLE_NOT_FOUND")
        return self.kept[topic, name]

    def _policy(self, name: str, operator: bool) -> Policy:
        if (name, operator) not in self.set_policies:
            raise NotFound(f"there is no policy {name!r}", reason="POLICY_NOT_FOUND")
        return self.set_policies[name, operator]

    def _called(self, call: str, /, **arguments: object) -> None:
        self.calls.append((call, arguments))
        if self.fails_with is not None:
            raise self.fails_with

    def arguments_of(self, name: str) -> dict[str, object]:
        """The arguments of the last call of that name."""
        return next(arguments for called, arguments in reversed(self.calls) if called == name)
