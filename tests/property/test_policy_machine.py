"""Policies, defaults and declarations of topics change in any order, with crashes in between. The settings in force
follow the rule, no expired record is ever seen, and nothing hidden reappears (rules T2, T4, L8, L12)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import NEVER, Expiration, MessageType, TopicSettings
from sow_server.engine.values.policies import Declared, Policies, Policy, check_limits_and_values, resolve_topic, tidy
from tests.support.oracles.examples import examples
from tests.support.stores.stores import SECOND, Rig

OWN: Final[Mapping[str, object]] = {"message_type": MessageType.BINARY}
NAMES: Final = ("a", "ab", "b")
names = st.sampled_from(NAMES)
spans = st.sampled_from([1, SECOND, 5 * SECOND, 20 * SECOND])


def _legal(declared: Declared) -> bool:
    try:
        check_limits_and_values(declared)
    except StoreError:
        return False
    return True


limits = st.fixed_dictionaries({}, optional={"max_ttl_micros": spans, "max_entries": st.integers(1, 3)})
settings = st.fixed_dictionaries(
    {},
    optional={
        "expiration": st.sampled_from(Expiration),
        "default_ttl_micros": spans,
        "min_ttl_micros": spans,
        "max_ttl_micros": spans,
        "retain_bytes": st.sampled_from([None, 10**6]),
    },
).filter(_legal)
policies = st.builds(
    Policy,
    st.sampled_from(["p", "q"]),
    st.sampled_from(["a", "a.*", ".*", "b"]),
    settings.filter(bool),
    st.integers(0, 1),
) | st.builds(Policy, st.just("o"), st.sampled_from(["a.*", ".*"]), limits.filter(bool), operator=st.just(True))


class PolicyMachine(RuleBasedStateMachine):
    """Drives a store, and computes beside it the settings in force and the live records."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.defaults: Declared = {}
        self.rig = Rig(self.folder, options=self._options())
        self.policies: dict[tuple[bool, str], Policy] = {}
        self.declared: dict[str, Declared] = {}
        self.records: dict[str, dict[bytes, int]] = {}
        for name in NAMES:
            self.rig.store.administration.create_topic(name, OWN)
            self.rig.store.writer.step()
            self.declared[name], self.records[name] = dict(OWN), {}

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.folder)

    def _options(self) -> StoreOptions:
        return StoreOptions(defaults=self.defaults, writer=WriterOptions(sweep_entries_max=3))

    def _expected(self, name: str) -> TopicSettings:
        policies = Policies(self.policies.values())
        return resolve_topic(name, self.declared[name], policies, self.defaults, expiring=True).settings

    def _settle(self, acted: Mapping[str, bool]) -> None:
        """A record that was overdue on a topic that acted on it, and acts no more, is gone (rule L12)."""
        now = self.rig.clock.now_micros()
        for name, before in acted.items():
            if before and not self._expected(name).acts_on_expiration:
                self.records[name] = {key: stamp for key, stamp in self.records[name].items() if stamp > now}

    def _acted(self) -> dict[str, bool]:
        return {name: self._expected(name).acts_on_expiration for name in NAMES}

    @rule(policy=policies)
    def set_policy(self, policy: Policy) -> None:
        acted = self._acted()
        answers: list[object] = []
        self.rig.store.administration.set_policy(policy).then(answers.append)
        self.rig.store.writer.step()
        assert answers == [policy]
        self.policies[policy.operator, policy.name] = policy
        self._settle(acted)

    @rule(key=st.sampled_from([(False, "p"), (False, "q"), (True, "o")]))
    def delete_policy(self, key: tuple[bool, str]) -> None:
        operator, name = key
        acted = self._acted()
        answers: list[Policy | StoreError] = []
        self.rig.store.administration.delete_policy(name, operator=operator).then(answers.append)
        self.rig.store.writer.step()
        (answer,) = answers
        if isinstance(answer, StoreError):
            assert (answer.reason, key in self.policies) == (Reason.POLICY_NOT_FOUND, False)
        else:
            assert answer == self.policies.pop(key)
            self._settle(acted)

    @rule(policy=policies, begun=st.booleans())
    def set_policy_and_be_killed(self, policy: Policy, begun: bool) -> None:
        """All of it or nothing, whenever the process is killed: before it is begun, after its first commit, which is
        its only one unless an expiry index has to be completed first, and always before its effects."""
        acted = self._acted()
        self.rig.store.administration.set_policy(policy)
        if begun:
            self.rig.turn()
        known = self.policies.get((policy.operator, policy.name)) == policy
        self.rig.crash()
        if policy in list(self.rig.store.administration.policies):
            assert begun or known
            self.policies[policy.operator, policy.name] = policy
            self._settle(acted)

    @rule(name=names, declared=settings)
    def alter_topic(self, name: str, declared: Declared) -> None:
        acted = self._acted()
        answers: list[object] = []
        self.rig.store.administration.alter_topic(name, lambda _: {**OWN, **declared}).then(answers.append)
        self.rig.store.writer.step()
        assert not isinstance(answers[0], StoreError), answers
        self.declared[name] = tidy({**OWN, **declared})
        self._settle(acted)

    @rule(defaults=settings, orderly=st.booleans())
    def restart_with_other_defaults(self, defaults: Declared, orderly: bool) -> None:
        acted = self._acted()
        self.defaults = defaults
        self.rig.options = self._options()
        (self.rig.reopen if orderly else self.rig.crash)()
        self._settle(acted)

    @rule(name=names, key=st.sampled_from("xyz"), ttl=st.none() | spans)
    def put(self, name: str, key: str, ttl: int | None) -> None:
        outcome = self.rig.put(name, key, ttl=ttl)
        if outcome.applied:
            self.records[name][key.encode()] = self.rig.stored(name)[key.encode()].expire_time_micros
        else:
            assert self._expected(name).expiration is Expiration.REJECT

    @rule(span=spans)
    def wait(self, span: int) -> None:
        self.rig.time.tick(span)

    @rule()
    def sweep(self) -> None:
        while self.rig.store.sweep():
            pass
        now = self.rig.clock.now_micros()
        for name in NAMES:
            if self.rig.topic(name).acts:
                assert all(one.expire_time_micros > now for one in self.rig.stored(name).values()), "swept (rule L9)"

    @invariant()
    def what_is_in_force_is_what_the_rule_says(self) -> None:
        for name in NAMES:
            assert self.rig.topic(name).settings == self._expected(name)

    @invariant()
    def what_is_alive_is_seen_and_nothing_else(self) -> None:
        now = self.rig.clock.now_micros()
        for name in NAMES:
            acts = self._expected(name).acts_on_expiration
            alive = {key for key, stamp in self.records[name].items() if not acts or stamp > now}
            found = self.rig.live(name)
            assert found.keys() == alive
            assert all(found[key].expire_time_micros == self.records[name][key] for key in alive), "stamps never change"
            assert all(stamp <= NEVER for stamp in self.records[name].values())


TestPolicies = PolicyMachine.TestCase
# Few and short ones: each opens a database many times.
TestPolicies.settings = hypothesis.settings(max_examples=examples(1_000, share=200), stateful_step_count=30)
