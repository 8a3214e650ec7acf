"""The topics and views that the configuration file declares, as a start makes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TypeVar

import structlog

from sow_server.config import DeclaredView
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.pending import Pending
from sow_server.engine.store import Store
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.policies import Declared, warnings
from sow_server.placement import Places
from sow_server.query.view_plans import check_definition

log = structlog.get_logger(__name__)
T = TypeVar("T")


class DeclarationError(Exception):
    """A topic or a view of the configuration cannot be made: one message with the reason."""


def placed_here(declared: Mapping[str, T], places: Places | None) -> Mapping[str, T]:
    """Topics or views of the configuration, without those that are placed in another cell: cells may share a file."""
    if places is None:
        return declared
    return {name: value for name, value in declared.items() if places.elsewhere(name) is None}


def declare_topics(
    store: Store, declared: Mapping[str, Declared], views: Mapping[str, DeclaredView] = MappingProxyType({})
) -> None:
    """Creates and alters topics and views as the configuration file declares them. What left the file stays and belongs
    to the administrator (rule K1). A view with another definition is made anew (rule V7). Raises DeclarationError."""

    administration = store.administration

    def finish(name: str, change: Pending[T]) -> None:
        table = "views" if name in views else "topics"
        try:
            store.finish(change)
        except StoreError as error:
            raise DeclarationError(f"[{table}.{name}]: {error.message}") from error

    for name, view in views.items():  # first: they may keep their sources from being altered
        there = store.topics.by_name.get(name)
        if there is not None and there.view not in (None, view.definition):
            # A view with its durables does not go for one that is refused.
            _check_definition(store, name, declared, views)
            finish(name, administration.delete_topic(name, force=True, in_config=True))

    for name, settings in declared.items():
        found = store.topics.by_name.get(name)
        if found is None:
            finish(name, administration.create_topic(name, settings, in_config=True))
        elif found.declaration.settings != settings or not found.in_config:
            finish(name, administration.alter_topic(name, _replaced_by(settings), in_config=True))
    for name, view in views.items():
        there = store.topics.by_name.get(name)
        if there is None or there.view is None:  # a topic of that name is refused there
            finish(name, administration.create_topic(name, view.settings, in_config=True, view=view.definition))
        elif there.declaration.settings != view.settings or not there.in_config:
            finish(name, administration.alter_topic(name, _replaced_by(view.settings), in_config=True))
    for name, topic in store.topics.by_name.items():
        if topic.in_config and name not in declared and name not in views:
            finish(name, administration.release_topic(name))


def _check_definition(store: Store, name: str, declared: Collection[str], views: Mapping[str, DeclaredView]) -> None:
    definitions = {view: declared_view.definition for view, declared_view in views.items()}
    try:
        check_definition(definitions[name], store.topics.by_name, declared, definitions)
    except StoreError as error:
        raise DeclarationError(f"[views.{name}]: {error.message}") from error


def _replaced_by(settings: Declared) -> Callable[[Declared], Declared]:
    return lambda _: settings


def warn_of_settings(topics: Topics) -> None:
    """Logs the settings in force that are probably not intended."""
    for topic in list(topics.by_id.values()):
        for warning in (*warnings(topic.settings), *topic.above_caps):
            log.warning("settings_questionable", topic=topic.name, warning=warning)
