"""Building a view from the records that are older than it, some at a time in commits between those of others (V6).

[1]  It goes in the order of keys. Its row in `meta` is its position, which moves in the commit that adds the records
     before it; changes of these are settled from then on (views [3]).
[2]  A build that was interrupted goes on where its last commit has ended, and says so.
"""

from __future__ import annotations

from typing import Final

import structlog

from sow_server.engine.background import Background, ChunkedWork
from sow_server.engine.commit.draft import Draft
from sow_server.engine.derived.views import View, Views
from sow_server.engine.disk.layout import VIEW_KEY
from sow_server.engine.disk.rocks import META, Rocks

log = structlog.get_logger(__name__)

BUILD_CHUNK: Final = 1000
"""Records that one commit adds."""


class ViewBuild(ChunkedWork):
    """The work that builds one view."""

    def __init__(self, rocks: Rocks, views: Views, view: View) -> None:
        super().__init__(rocks, view.source, VIEW_KEY + view.topic.prefix, records_max=BUILD_CHUNK)
        self._views = views
        self._view = view
        self._position: bytes | None = None

    @property
    def topic_name(self) -> str:
        """The view."""
        return self._view.topic.name

    def stage(self, draft: Draft) -> None:
        """Stages the next records, and with the last of them the begin of the view's journal."""
        super().stage(draft)
        topic = self._view.topic
        self._position = draft.batch.puts[META].get(self.row)
        if self._ends:
            draft.statistics[topic.id] = draft.figures(topic).trimmed(draft.next_sequence - 1)

    def stage_records(self, draft: Draft, keys: list[bytes], values: list[bytes]) -> None:
        """Stages that they are in the view."""
        self._views.stage_built(draft, self._view, keys, values)

    def committed(self) -> bool:
        """True if there may be more."""
        if self._more or self._ends:
            self._view.position = self._position
            self._view.show()
        return super().committed()

    def finished(self) -> None:
        """From now on the view is read, and its changes are journaled."""
        self._views.topics.completed()
        log.info("view_built", topic=self._view.topic.name, records_read=self._view.counts.records_read)


def resume(rocks: Rocks, background: Background, views: Views) -> None:
    """Goes on with the views that the last process has not completed [2]. A start does not wait for it."""
    for view in views.incomplete():
        log.info("view_build_resumed", topic=view.topic.name, records_read=view.counts.records_read)
        background.run(ViewBuild(rocks, views, view))
