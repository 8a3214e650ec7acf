"""The filter language, in which queries, subscriptions and deletes select records (docs/filters.md).

    tree = parse("/price > 100 AND /symbol IN ('IBM', 'MSFT')")     # or FilterError, with the position
    predicate = compile_filter(tree, key_paths=[("id",)])
    predicate({"symbol": "IBM", "price": 101.5}, meta)              # True
    print_filter(tree)                                              # the canonical text of the tree

Pure: no clock, no store. Times come in with `Meta`, and payloads are decoded by the caller.
"""

from __future__ import annotations

from sow_server.filters.compiler import compile_filter
from sow_server.filters.filter_errors import FilterError
from sow_server.filters.parser import parse
from sow_server.filters.predicate import Matcher, Meta, Predicate
from sow_server.filters.printer import print_filter, print_path
from sow_server.filters.tree import Filter

__all__ = [
    "Filter",
    "FilterError",
    "Matcher",
    "Meta",
    "Predicate",
    "compile_filter",
    "parse",
    "print_filter",
    "print_path",
]
