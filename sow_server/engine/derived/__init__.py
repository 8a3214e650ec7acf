"""Topics that are derived from others: views (rules V1 to V9).

plans.py     what is compiled from a definition, as the engine uses it
groups.py    the groups of views in memory
views.py     settles views in the commit of every change
building.py  builds a view from the records that are older than it
"""

from __future__ import annotations

from sow_server.engine.derived.building import ViewBuild, resume
from sow_server.engine.derived.plans import PlanOf, ViewPlan
from sow_server.engine.derived.views import VIEWS_MAX, View, Views

__all__ = ["VIEWS_MAX", "PlanOf", "View", "ViewBuild", "ViewPlan", "Views", "resume"]
