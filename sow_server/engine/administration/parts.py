"""The parts of the store that changes of topics and policies touch."""

from __future__ import annotations

from dataclasses import dataclass

from sow_server.engine.background import Background
from sow_server.engine.catalog.policies_in_force import PoliciesInForce
from sow_server.engine.commit.expiry import Sweep
from sow_server.engine.core import Core
from sow_server.engine.derived import Views
from sow_server.engine.durables import Durables
from sow_server.engine.loads import Loads
from sow_server.engine.replicas import Replicas


@dataclass(frozen=True, slots=True)
class Parts:
    """As they are handed to each change; used on the writer's thread."""

    core: Core
    policies: PoliciesInForce
    sweep: Sweep
    background: Background
    durables: Durables
    replicas: Replicas
    loads: Loads
    views: Views
