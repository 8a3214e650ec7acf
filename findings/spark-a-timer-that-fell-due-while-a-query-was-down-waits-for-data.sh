#!/usr/bin/env bash
# Versions: PySpark 4.3.0 with Java 17, pandas 2.3.3, pyarrow 26.0.1; transformWithState with processing-time timers.
#
# The guess: timers need no data. While a query runs, a deadline is met without any, as Spark plans batches for it. So one
# that passed while the query was down is met in the first batch after the restart.
# What happens: after a restart there is no first batch until data come, of whatever key. On a quiet source the timer waits
# for ever. (A `rate` source whose rows are all filtered out, united with the input, makes the batches.)
#
# Seen: 40 s after the restart, one that passed meanwhile: ['set'] Waiting for next trigger
#       once a row of another key has come: ['set', 'due']
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install pyspark==4.3.0 pandas==2.3.3 pyarrow==26.0.1 protobuf==6.33.6
cat >"$work/seen.py" <<'PYTHON'
import os, sys, time

from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

work = sys.argv[1]
os.environ["PYSPARK_PYTHON"] = sys.executable


class Deadlines(StatefulProcessor):
    def init(self, handle):
        self.handle = handle

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + row["ms"])
        yield Row(key=key[0], what="set")

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        yield Row(key=key[0], what="due")

    def close(self):
        pass


settings = {
    "spark.sql.shuffle.partitions": 1,
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}
spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
seen = []


def start():
    rows = spark.readStream.schema("key STRING, ms LONG").json(f"{work}/in").groupBy("key").transformWithState(
        Deadlines(), "key STRING, what STRING", "append", "processingTime"
    )
    return rows.writeStream.foreachBatch(
        lambda batch, number: seen.extend((row.key, row.what) for row in batch.collect())
    ).option("checkpointLocation", f"{work}/checkpoint").trigger(processingTime="1 second").start()


def put(name, ms):
    with open(f"{work}/{name}", "w") as file:
        file.write(f'{{"key": "{name}", "ms": {ms}}}\n')
    os.rename(f"{work}/{name}", f"{work}/in/{name}.json")


def wait_for(*wanted):
    give_up = time.monotonic() + 300
    while not set(wanted) <= set(seen):
        assert query.isActive and time.monotonic() < give_up, (seen, query.exception())
        time.sleep(0.2)


def of_second():
    return [what for key, what in seen if key == "second"]


os.mkdir(f"{work}/in")
put("first", 2_000)
query = start()
wait_for(("first", "set"), ("first", "due"))
print("while the query runs, a deadline of 2 s is met without new data:", seen)

put("second", 15_000)
wait_for(("second", "set"))
query.stop()
time.sleep(20)
query = start()
time.sleep(40)
print("40 s after the restart, one that passed meanwhile:", of_second(), query.status["message"])
is_met = ("second", "due") in seen
put("third", 600_000)
wait_for(("third", "set"), ("second", "due"))
print("once a row of another key has come:", of_second())
query.stop()
assert not is_met, "the behaviour has changed"
PYTHON
"$work/python/bin/python" "$work/seen.py" "$work" 2>"$work/log" || { tail -n 30 "$work/log"; exit 1; }
