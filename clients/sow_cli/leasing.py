"""`sow lease`: run a command while a record lives, and a record while the command runs."""

from __future__ import annotations

import subprocess
from typing import Final

import click

from sow_cli import arguments, display
from sow_cli.interrupts import Terminated
from sow_cli.output import note
from sow_cli.publishing import described_topic, tell_created
from sow_cli.session import Session
from sow_client import ConditionFailed, LeaseLost

SIGNAL_EXIT: Final = 128
"""Added to the number of the signal that has ended the command, as shells do."""


@click.command(short_help="Hold a record while a command runs.", context_settings={"ignore_unknown_options": True})
@click.argument("topic")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option("--key", type=arguments.key, metavar="KEY", help="Key of the record. For topics without key fields.")
@click.option("--data", default="{}", show_default=True, metavar="TEXT", help="The document of the record.")
@click.option(
    "--ttl",
    type=arguments.duration,
    default="15s",
    show_default=True,
    metavar="DURATION",
    help="How long the record outlives a holder that was killed.",
)
@click.pass_obj
def lease(session: Session, topic: str, command: tuple[str, ...], key: str | None, data: str, ttl: str) -> None:
    """Publish a record of TOPIC, run COMMAND, and delete the record when it ends. Of all that try, one runs at a time.

    If there is a record of that key already, COMMAND does not run, and the exit code is 1 (CONDITION_FAILED). The
    record is renewed each third of --ttl. If it is lost, because the server was away for too long or another has
    changed the record, COMMAND gets SIGTERM, and the exit code is 1 (LEASE_LOST). After Ctrl-C and SIGTERM COMMAND ends
    first, then the record is deleted. Otherwise the exit code is that of COMMAND; if a signal has ended it, 128 and the
    number of the signal.

    \b
    Examples:
      sow lease locks --key nightly -- ./nightly.sh --all
      sow lease members --data '{"id": "web-1", "port": 8080}' --ttl 5s -- ./serve
    """
    running: list[subprocess.Popen[bytes]] = []

    def stop(_lost: LeaseLost) -> None:
        for process in running:
            process.terminate()

    with session.client() as client, client.lease(ttl, on_lost=stop) as held:
        found = described_topic(client, topic)
        try:
            held.publish(topic, data.encode(), key=key, only_if_absent=True)
        except ConditionFailed:
            note(f"sow: another has this record of {display.safe(topic)}, so {display.safe(command[0])} does not run")
            raise
        tell_created(client, topic, found, published=1)
        try:
            process = subprocess.Popen(command)
        except OSError as error:
            raise click.UsageError(f"cannot run {command[0]}: {error.strerror}") from error
        running.append(process)
        if held.lost is not None:  # it may have been lost before there was anything to stop
            process.terminate()
        try:
            code = process.wait()
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated):
                process.terminate()  # after Ctrl-C the terminal has told the command itself
            process.wait()
            raise
    click.get_current_context().exit(SIGNAL_EXIT - code if code < 0 else code)
