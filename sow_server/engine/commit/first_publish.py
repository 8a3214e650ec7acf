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
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.publishers import Publisher, PublisherCache
from sow_server.engine.commit.requests import AtomicAborted, Job, Slice, prepare
from sow_server.engine.commit.steps import TopicStep
from sow_server.engine.commit.work import Room, atomic_too_large, merge_room
from sow_server.engine.values.errors import Reason, StoreError, no_topic
from sow_server.engine.values.model import Outcome, Publish, Request


class RefusedFirst(NamedTuple):
    """A publish that would change nothing: each record is refused, or a removal."""

    outcome: Outcome
    publishers: dict[str, Publisher]
    """The publisher of the request, to be stored."""


def creation(create: Callable[[str], TopicStep] | None, topics: Topics, request: Request) -> TopicStep | None:
    """The step that creates the topic of a request; None: the topic exists, or the request creates none."""
    if create is None or not isinstance(request, Publish) or request.topic in topics.by_name:
        return None
    return create(request.topic)


def creates(create: Callable[[str], TopicStep] | None, topics: Topics, job: Job) -> bool:
    """True if a job may create its topic: the job has not been prepared yet, or its topic was deleted while it
    waited."""
    gone = job.topic is None or job.topic.id not in topics.by_id
    return gone and creation(create, topics, job.request) is not None


def refused(
    new_draft: Callable[[], Draft], job: Job, step: TopicStep, options: WriterOptions, publishers: PublisherCache
) -> RefusedFirst | None:
    """None: something of the publish would be applied, so its topic is to be created. Raises StoreError as the publish
    itself would."""
    draft = new_draft()
    step.stage(draft)
    topic = step.topic
    trial = Job(job.request)
    try:
        prepare(trial, topic, options.limits)
    except StoreError as error:
        if error.reason is not Reason.KEY_REQUIRED:
            raise
        # The topic that it would create takes no such records: rather its name is mistyped, or it was not created yet.
        raise no_topic(topic.name, "a publish without keys creates none; create it with its key fields first") from None
    draft.merge_room = options.commit_merged_bytes_max if trial.alone else merge_room(options)
    while True:
        part = _staged(draft, trial, options, publishers)
        if part.applied > part.unchanged or draft.notes:
            return None
        trial.merge(part)
        if not trial.left:
            break
    kept = {
        name: publisher._replace(topics=tuple([one for one in publisher.topics if one != topic.id]))
        for name, publisher in draft.publishers.items()
    }
    return RefusedFirst(trial.outcome, kept)


def _staged(draft: Draft, job: Job, options: WriterOptions, publishers: PublisherCache) -> Slice:
    """Stages as much of a publish as one commit takes: a record that is applied ends the trial."""
    fits = Room(options).take(draft, job, first=True)
    assert fits is not None, "it is the first"
    count = fits[0]
    chosen = [(job, count)]
    try:
        fetch_heads(draft, chosen)
        fetch_values(draft, chosen)
        part = stage_job(draft, job, count, publishers)
        draft.end_request()
    except AtomicAborted as aborted:
        return stage_aborted(draft, job, aborted, publishers)
    if job.alone and part.count < count:
        raise atomic_too_large(job, options)
    return part
