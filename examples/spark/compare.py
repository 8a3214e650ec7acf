"""A comparison: the table of a capture against its topic, at one instant, while both go on changing.

    .venv/bin/python -m examples.spark.compare HOST:PORT FOLDER

FOLDER is a table that `examples.spark.capture` made. The exit code is 1 if they differ.
"""

from __future__ import annotations

import sow_spark
from examples.spark.capture import flights
from examples.spark.lake import bookmark, frame, position
from examples.spark.session import command, session


def main(server: str, folder: str) -> int:
    """Prints the differences."""
    spark = session("compare flights")
    # The position first: if the table moves on in between, its rows are newer, and the keys that changed are left out.
    at = bookmark(*position(flights(server), folder))
    rows = frame(spark, folder)
    with sow_spark.diff(rows, "flights", options={"server": server}, position=at) as found:
        counts = found.counts()
        told = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items())) or "no difference"
        print(f"as of {found.as_of}: {told}; {found.unsettled:,} keys have changed since the table was written")
        if counts:
            found.rows.show(10, truncate=False)
    return 1 if counts else 0


if __name__ == "__main__":
    command(main)
