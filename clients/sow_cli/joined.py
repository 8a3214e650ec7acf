"""Lists over all cells: what the cells that answer have, and a warning for each other one (rule C20)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import click

from sow_cli.exits import NOT_REACHABLE, SERVER_SAID_NO, is_unanswered
from sow_cli.output import Fact, Facts, note
from sow_client import Client, SowError

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., object])


def here_option(command: Command) -> Command:
    """The option `--here`."""
    told = "Only the cell of this server, where there are several."
    return click.option("--here", is_flag=True, help=told)(command)


@dataclass(frozen=True, slots=True)
class Joined(Generic[T]):
    """The answers of the cells to one question."""

    answers: Mapping[str, T]
    """Those that came, by cell; that of one server is under ""."""
    missing: Mapping[str, SowError]

    @property
    def several(self) -> bool:
        """True: there are several cells, so that each row names its own."""
        return len(self.answers) + len(self.missing) > 1

    def rows(self, rows_of: Callable[[T], Iterable[Facts]], *, ordered_by: int) -> list[Facts]:
        """The rows of all answers, in the order of their first facts."""
        found = [(cell, facts) for cell, answer in self.answers.items() for facts in rows_of(answer)]
        if not self.several:
            return [facts for _, facts in found]
        found.sort(key=lambda row: [str(fact.value) for fact in row[1][:ordered_by]])
        return [[facts[0], Fact("cell", cell, cell), *facts[1:]] for cell, facts in found]

    def in_cells(self) -> Iterator[tuple[str, T]]:
        """The answers, each with the name of its cell, which is "" where there is one."""
        return ((cell if self.several else "", answer) for cell, answer in self.answers.items())

    def names(self, names: Sequence[str]) -> list[str]:
        """The names of the facts of a row."""
        return [names[0], "cell", *names[1:]] if self.several else [*names]

    def end(self) -> None:
        """Warns of the cells that are missing, and ends the command with a failure if there are any."""
        for cell, error in self.missing.items():
            warn(cell, error)
        if self.missing:
            unanswered = any(map(is_unanswered, self.missing.values()))
            click.get_current_context().exit(NOT_REACHABLE if unanswered else SERVER_SAID_NO)


def warn(cell: str, error: SowError) -> None:
    """Tells that the answer of a cell is missing."""
    message = error.message.removeprefix(f"the cell {cell}: ")
    note(f"warning: without the cell {cell}: {error.reason}: {message}")


def of_topic(client: Client, topic: str | None, ask: Callable[[Client], T], *, here: bool) -> Joined[T]:
    """Asks the cell of a topic; None: as `asked`."""
    return asked(client, ask, here=here) if topic is None or here else Joined({"": ask(client)}, {})


def asked(client: Client, ask: Callable[[Client], T], *, here: bool = False) -> Joined[T]:
    """Asks all cells, or with `here` that of the server alone. Raises the error of the first one if none answers."""
    if here:
        return Joined({"": ask(client.here)}, {})
    answers: dict[str, T] = {}
    missing: dict[str, SowError] = {}
    for cell, answer in client.in_each_cell(ask).items():
        if isinstance(answer, SowError):
            missing[cell] = answer
        else:
            answers[cell] = answer
    if not answers:
        raise next(iter(missing.values()))
    return Joined(answers, missing)
