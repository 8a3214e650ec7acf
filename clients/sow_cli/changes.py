"""`sow changes`: the retained changes of a topic up to now, or up to a bookmark, and then the end.

[1]  The command ends at the last change that was on disk when it began, and tells its bookmark, to go on from there.
"""

from __future__ import annotations

from datetime import datetime

import click

from sow_cli import arguments
from sow_cli.filter_parameters import Values, param_option
from sow_cli.messages import TopicForms, message_writer
from sow_cli.output import Output, message_output_option, note
from sow_cli.session import Session
from sow_client import EARLIEST


@click.command(short_help="Show the changes of a topic up to now.")
@click.argument("topic")
@click.argument("filter_text", metavar="[FILTER]", required=False)
@param_option
@click.option(
    "--key", "keys", multiple=True, type=arguments.key, metavar="KEY", help="Only changes of this key (repeatable)."
)
@click.option(
    "--from",
    "start",
    type=arguments.position,
    metavar="BOOKMARK|earliest|TIME",
    help="Begin after a bookmark, with the earliest retained change (default), or at a time.",
)
@click.option(
    "--to", "end", metavar="BOOKMARK", help="End with this bookmark; default: the last change that is on disk."
)
@message_output_option
@click.pass_obj
def changes(
    session: Session,
    *,
    topic: str,
    filter_text: str | None,
    parameters: Values | None,
    keys: tuple[str, ...],
    start: str | datetime | None,
    end: str | None,
    output: Output,
) -> None:
    """Show the changes of TOPIC whose new or previous record matches FILTER, in order, and end: puts, deletes and
    expiries, as the journal has them.

    A line on stderr has the bookmark of the end: the next `--from`. A bookmark from before the begin of the journal is
    refused (BOOKMARK_TOO_OLD). `sow subscribe TOPIC --changes` also follows later changes. With --key nothing else of
    the journal is sent, however many changes there are. A table shows when each was published.

    \b
    Examples:
      sow changes orders
      sow changes orders --key 1 --key 2
      sow changes orders "/price > 9" --from 2030-01-31T12:00:00Z --format csv
      sow changes orders --from 4f9d2c1e8a70.1200 >> changes.ndjson
    """
    with session.client() as client:
        forms = TopicForms(client)
        forms.of(topic)
        plan = client.plan_changes(topic, start=EARLIEST if start is None else start, end=end)
        writer = message_writer(output, forms, several_topics=False, past=True)
        output.page()
        try:
            if plan.entries:
                history = plan.start if filter_text else None
                for change in client.changes(
                    topic,
                    plan.start,
                    plan.end,
                    filter=filter_text,
                    parameters=parameters,
                    history=history,
                    keys=keys or None,
                ):
                    writer.write(change)
        finally:
            writer.finish()
    note(f"up to {plan.end}")
