"""Topics that are derived from others: views (rules V1 to V9).

plans.py        what is compiled from a definition, as the engine uses it
view_memory.py  the groups and the rows of views in memory
views.py        settles views in the commit of every change
building.py     builds a view from the records that are older than it
"""

from __future__ import annotations

from sow_server.engine.derived.building import ViewBuild, resume
from sow_server.engine.derived.plans import PlanOf, ViewPlan
from sow_server.engine.derived.views import View, Views

__all__ = ["PlanOf", "View", "ViewBuild", "ViewPlan", "Views", "resume"]
