"""The first publish to a topic that does not exist creates the topic only if it changes something (rule K1).

[1]  The publish is staged with the topic as it would be, on a draft that is never written. So a topic that would stay
     empty is not there for a moment, and its id is not used.
[2]  The memory of the publisher is kept also without the topic (rule P6).
[3]  A refusal that peers have to learn of (rule F11) is told as one of its topic, which is created then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sow_server.engine.catalog.topics import Topics
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.mutations import fetch_heads, fetch_values, stage_aborted, stage_job
from sow_server.engine.commit.publishers import Publisher, PublisherCache
from sow_server.engine.commit.requests import AtomicAborted, Job, RequestLimits, Slice, prepare
from sow_server.engine.commit.steps import TopicStep
from sow_server.engine.values.model import Publish, Request


class RefusedFirst(NamedTuple):
    """The outcome of a publish of which nothing would be applied."""

    part: Slice
    publishers: dict[str, Publisher]
    """The publisher of the request, to be stored."""


def creation(create: Callable[[str], TopicStep] | None, topics: Topics, request: Request) -> TopicStep | None:
    """The step that creates the topic of a request; None: the topic exists, or the request creates none."""
    if create is None or not isinstance(request, Publish) or request.topic in topics.by_name:
        return None
    return create(request.topic)


def refused(
    draft: Draft, job: Job, step: TopicStep, limits: RequestLimits, publishers: PublisherCache
) -> RefusedFirst | None:
    """None: something of the publish would be applied, so its topic is to be created. `draft` is used up. Raises
    StoreError as the publish itself would."""
    step.stage(draft)
    topic = step.topic
    prepare(job, topic, limits)
    try:
        fetch_heads(draft, [(job, job.left)])
        fetch_values(draft, [(job, job.left)])
        part = stage_job(draft, job, job.left, publishers)
        draft.end_request()
    except AtomicAborted as aborted:
        part = stage_aborted(draft, job, aborted, publishers)
    if part.applied or draft.notes:
        return None
    kept = {
        name: publisher._replace(topics=tuple([one for one in publisher.topics if one != topic.id]))
        for name, publisher in draft.publishers.items()
    }
    return RefusedFirst(part, kept)
