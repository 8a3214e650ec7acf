#!/usr/bin/env bash
# Versions: APScheduler 3.11.3; BackgroundScheduler and AsyncIOScheduler, `coalesce=True`, `misfire_grace_time=None`.
#
# The guess: "every half second" goes by a steady clock. Setting the time of day shifts no interval, or costs one run.
# What happens: set back by an hour, no interval job runs for that hour. The scheduler sleeps through it in one wait, so it also
# stays away when the clock is set right again a moment later, until a job is added or changed. Here the time of day is a double
# in place of `datetime`, since to set the clock needs root; waiting goes on by the real, steady one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install APScheduler==3.11.3
"$work/python/bin/python" - <<'PYTHON'
import asyncio
from datetime import datetime, timedelta

import apscheduler.schedulers.base as base
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler


class TimeOfDay(datetime):
    ahead = timedelta(hours=1)

    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + cls.ahead


base.datetime = TimeOfDay


async def seen(kind):
    TimeOfDay.ahead, runs, counts = timedelta(hours=1), [], {}
    scheduler = kind(job_defaults={"coalesce": True, "misfire_grace_time": None})
    job = scheduler.add_job(lambda: runs.append(1), "interval", seconds=0.5)
    scheduler.start()
    for state in ("ahead", "set back", "set ahead again", "a job is changed"):
        if state == "set back":
            TimeOfDay.ahead = timedelta()
        elif state == "set ahead again":
            TimeOfDay.ahead = timedelta(hours=1)
        elif state == "a job is changed":
            job.modify(name="other")
        await asyncio.sleep(0.6)  # what was under way ends
        runs.clear()
        await asyncio.sleep(3)
        counts[state] = len(runs)
    scheduler.shutdown(wait=False)
    return counts


for kind in (BackgroundScheduler, AsyncIOScheduler):
    counts = asyncio.run(seen(kind))
    print(f"{kind.__name__}: runs in 3 s: {counts}")
    assert counts["set back"] == counts["set ahead again"] == 0, "the behaviour has changed"
    assert counts["ahead"] >= 3 and counts["a job is changed"] >= 3, "the behaviour has changed"
PYTHON
