"""The Spark data source `sow`: topics as tables, read and written, in batches and as streams.

    import sow_spark
    spark.dataSource.register(sow_spark.SowDataSource)
    spark.read.format("sow").option("server", "127.0.0.1:7450").option("topic", "orders").load()

`sow_spark.diff` compares a table with a topic, and `sow_spark.state_of_the_world` keeps the last value of each key of a
stream in Spark itself. docs/spark.md describes the options and their guarantees, docs/lake.md the comparison,
docs/scale.md the state.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sow_spark.source import SowDataSource

if TYPE_CHECKING:
    from sow_spark.differences import Differences, diff
    from sow_spark.state import alive, state_of_the_world
    from sow_spark.state_queries import read_state, repartition_state, start_state, stop_state
    from sow_spark.stream_ending import stop_for_good

__all__ = [
    "Differences",
    "SowDataSource",
    "alive",
    "diff",
    "read_state",
    "repartition_state",
    "start_state",
    "state_of_the_world",
    "stop_for_good",
    "stop_state",
]


_MODULES = {
    **dict.fromkeys(("Differences", "diff"), "differences"),
    **dict.fromkeys(("alive", "state_of_the_world"), "state"),
    **dict.fromkeys(("read_state", "repartition_state", "start_state", "stop_state"), "state_queries"),
    "stop_for_good": "stream_ending",
}


def __getattr__(name: str) -> object:
    """Imports a module when it is used: every process that Spark starts for a plan pays for its imports."""
    if name in _MODULES:
        return getattr(import_module(f"sow_spark.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
