"""The topics and views that the configuration file declares, as a start makes them; and the store of a cell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import structlog

from sow_server.config import Config, ConfigError, DeclaredView
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.pending import Pending
from sow_server.engine.store import Store
from sow_server.engine.upkeep import KeptPlacement
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.policies import Declared, warnings
from sow_server.placement import Placement, Places, configured_places, separated
from sow_server.prepared import PreparedFile
from sow_server.query.view_plans import check_definition

T = TypeVar("T")
log = structlog.get_logger(__name__)


class DeclarationError(Exception):
    """A topic or a view of the configuration cannot be made: one message with the reason."""


def placed_here(declared: Mapping[str, T], places: Places | None) -> Mapping[str, T]:
    """Topics or views of the configuration, without those that are placed in another cell: cells may share a file."""
    if places is None:
        return declared
    return {name: value for name, value in declared.items() if places.elsewhere(name) is None}


def declare(store: Store, config: Config) -> Places | None:
    """Makes the topics of the configuration that are placed here; returns the placement. Before the writer starts.
    Raises ConfigError, DeclarationError."""
    places = configured_places(config)
    use_placement(store, places)
    if places is not None:
        PreparedFile(config.server.data_dir, places.file).hold(places)
    declare_topics(store, placed_here(config.topics, places), placed_here(config.views, places))
    if places is not None:
        tell_separated(store, places)
        store.commits.refuse_elsewhere(places.refusal)
    return places


def declare_topics(
    store: Store, declared: Mapping[str, Declared], views: Mapping[str, DeclaredView] = MappingProxyType({})
) -> None:
    """Creates and alters topics and views as the configuration file declares them. What left the file stays and belongs
    to the administrator (rule K1). A view with another definition is made anew (rule V7). Before the writer starts.
    Raises DeclarationError."""
    for name, change in _changes(store, declared, views):
        try:
            store.finish(change)
        except StoreError as error:
            raise _failed(name, error, views) from error


class CellStore:
    """The store of a cell: it remembers the placement in force, and has the topics of the configuration that are placed
    here (rules C1, C4, C25)."""

    def __init__(self, store: Store, config: Config, places: Places) -> None:
        self._store = store
        self._config = config
        self._places = places

    async def keep(self, placement: Placement) -> None:
        """Remembers the placement that is about to be in force. Raises StoreError."""
        await self._store.upkeep.keep_placement(_kept(placement))

    async def settled(self) -> None:
        """Returns once no change of a topic that has gone is under way. Raises StoreError."""
        await self._store.commits.moved()

    async def declare(self) -> None:
        """Makes the topics of the configuration that have come to this cell. The placement is in force whether or not
        that works: a fault is told in the log, and the next start tells it again."""
        topics, views = placed_here(self._config.topics, self._places), placed_here(self._config.views, self._places)
        try:
            for name, change in _changes(self._store, topics, views):
                try:
                    await change
                except StoreError as error:
                    if error.reason is not Reason.TOPIC_EXISTS or name in views:
                        raise _failed(name, error, views) from error
                    # Somebody has published to it just now.
                    await self._store.administration.alter_topic(name, _replaced_by(topics[name]), in_config=True)
        except (DeclarationError, StoreError) as error:
            log.error("declaration_failed", cause=str(error))
        tell_separated(self._store, self._places)


def tell_separated(store: Store, places: Places) -> None:
    """Tells of topics here that need one of another cell (rule C26)."""
    for one in separated(store.topics.by_id.values(), places):
        log.warning("topics_separated", topic=one.topic, setting=one.setting, other=one.other, cell=one.cell)


def use_placement(store: Store, places: Places | None) -> None:
    """Checks the placement of a start against the one that was in force here, and remembers it (rule C25). Before the
    writer starts. Raises ConfigError."""
    kept = store.upkeep.placement()
    if kept is not None:
        _check(kept, places)
    wanted = None if places is None else _kept(places.placement)
    if wanted != kept:
        store.finish(store.upkeep.keep_placement(wanted))


def _check(kept: KeptPlacement, places: Places | None) -> None:
    if places is None:
        if kept.cells > 1:
            raise ConfigError(
                f"[placement] file: is missing, although these data are of a cell: a placement of {kept.cells} cells, "
                f"version {kept.version}, was in force here. To make it a server alone, start it once with a placement "
                "of this one cell, and a higher version"
            )
        return
    placement, file = places.placement, places.file
    if placement.version < kept.version:
        raise ConfigError(
            f"{file}: version: {placement.version} is below {kept.version}, which was in force here before; give this "
            "server the file that the others have, or raise the version"
        )
    if placement.version == kept.version and places.digest != kept.digest:
        raise ConfigError(
            f"{file}: version: {placement.version} was in force here with another content; raise it at each change"
        )


def _kept(placement: Placement) -> KeptPlacement:
    return KeptPlacement(placement.version, placement.digest, len(placement.cells))


def _failed(name: str, error: StoreError, views: Collection[str]) -> DeclarationError:
    return DeclarationError(f"[{'views' if name in views else 'topics'}.{name}]: {error.message}")


def _changes(
    store: Store, declared: Mapping[str, Declared], views: Mapping[str, DeclaredView]
) -> Iterator[tuple[str, Pending[Any]]]:
    """The changes by which the store has what is declared, with the names of their topics. Each is to be done before
    the next one is asked for. Raises DeclarationError."""
    administration = store.administration
    for name, view in views.items():  # first: they may keep their sources from being altered
        there = store.topics.by_name.get(name)
        if there is not None and there.view not in (None, view.definition):
            # A view with its durables does not go for one that is refused.
            _check_definition(store, name, declared, views)
            yield name, administration.delete_topic(name, force=True, in_config=True)

    for name, settings in declared.items():
        found = store.topics.by_name.get(name)
        if found is None:
            yield name, administration.create_topic(name, settings, in_config=True)
        elif found.declaration.settings != settings or not found.in_config:
            yield name, administration.alter_topic(name, _replaced_by(settings), in_config=True)
    for name, view in views.items():
        there = store.topics.by_name.get(name)
        if there is None or there.view is None:  # a topic of that name is refused there
            yield name, administration.create_topic(name, view.settings, in_config=True, view=view.definition)
        elif there.declaration.settings != view.settings or not there.in_config:
            yield name, administration.alter_topic(name, _replaced_by(view.settings), in_config=True)
    for name, topic in list(store.topics.by_name.items()):
        if topic.in_config and name not in declared and name not in views:
            yield name, administration.release_topic(name)


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
