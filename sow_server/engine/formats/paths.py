"""Paths to fields, compiled once for a request or a subscription. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TypeAlias

Steps: TypeAlias = tuple[str, ...]
"""A path: the names from the top of a document to a field."""


class PathTree(dict[str, "PathTree | None"]):
    """Many paths, name by name: None for a field itself, a tree for fields below it. A path that leads below another
    path adds nothing."""

    @cached_property
    def names(self) -> frozenset[bytes]:
        """The first steps of all paths, as flat payloads have them."""
        return frozenset([name.encode("utf-8", "surrogatepass") for name in self])

    @cached_property
    def ends(self) -> frozenset[bytes]:
        """The same of the paths of one step alone."""
        return frozenset([name.encode("utf-8", "surrogatepass") for name, below in self.items() if below is None])

    @cached_property
    def height(self) -> int:
        """The steps of the longest path."""
        height, level = 0, [self]
        while level:
            height += 1
            level = [below for tree in level for below in tree.values() if below is not None]
        return height


def path_tree(paths: Iterable[Steps]) -> PathTree:
    """The tree of paths of one or more steps."""
    root = PathTree()
    for path in paths:
        at = root
        for step in path[:-1]:
            if step not in at:
                at[step] = PathTree()
            below = at[step]
            if below is None:
                break
            at = below
        else:
            at[path[-1]] = None
    return root
