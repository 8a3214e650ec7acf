"""`--plot`: results of groups as bars, a chart for each aggregate; and the course of a figure as a line of small bars.

[1]  A number stands beside each bar, exact unless it is long, and is never cut. A long name is cut with `…`.
[2]  All bars of a chart have one scale, and begin at zero, so lengths compare as values do. A value other than zero has
     a bar, however short; a value that is no number has none.
[3]  A pipe and a file get the same lines without styles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import count
from math import ceil, floor
from typing import Final

from rich.bar import Bar as Blocks
from rich.console import Console

from sow_cli import display
from sow_cli.colours import styled
from sow_cli.output import Format, Output
from sow_cli.tables import GAP, fit, terminal_width, text_width

FIGURE_WIDTH_MAX: Final = 24
"""A number that needs more is shown with six digits and its exponent."""
NAME_WIDTH_MIN: Final = 8
BAR_WIDTH_MIN: Final = 10
"""Names are cut before bars are shorter than this."""
_EIGHTHS: Final = 8
"""Bars grow by eighths of a character."""
_HEIGHTS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Bar:
    """A group in a chart."""

    name: str
    value: object
    """A number has a bar; a text, a boolean and None have none."""


def show(charts: Mapping[str, Sequence[Bar]]) -> None:
    """Draws charts by their titles, one below the other."""
    output = Output(Format.TABLE)
    output.page()
    width = terminal_width()
    output.write("\n".join(["\n".join(lines(*chart, width)) + "\n" for chart in charts.items()]).encode())


def charts(results: Sequence[Mapping[str, object]], group_names: int) -> dict[str, list[Bar]]:
    """The bars of each aggregate by its name. `group_names`: how many of the first names are those of the groups."""
    names = list(results[0])[group_names:] if results else []
    groups = [" · ".join(map(_shown, list(one.values())[:group_names])) or "all" for one in results]
    return {name: [Bar(group, one[name]) for group, one in zip(groups, results, strict=True)] for name in names}


def spread(micros: Sequence[float]) -> list[Bar]:
    """How many of the values are up to each bound of 1, 2, 5, 10 … microseconds, from the least value to the greatest.
    `micros`: sorted."""
    bars: list[Bar] = []
    counted = 0
    for bound in (digit * 10**zeros for zeros in count() for digit in (1, 2, 5)):
        if counted == len(micros):
            return bars
        upto = bisect_right(micros, bound)
        if upto:
            bars.append(Bar(f"≤ {display.duration(bound)}", upto - counted))
        counted = upto
    raise AssertionError("the bounds do not end")


def sparkline(values: Sequence[float]) -> str:
    """A character for each value, of heights from zero to the greatest one. A value above zero is never the lowest."""
    top = max(values, default=0)
    return "".join([_HEIGHTS[ceil(value / top * (len(_HEIGHTS) - 1)) if top else 0] for value in values])


def has_bars(bars: Sequence[Bar]) -> bool:
    """True if one of the values is a number."""
    return any(_number(bar.value) is not None for bar in bars)


def lines(title: str, bars: Sequence[Bar], width: int) -> Iterator[str]:
    """A chart in so many columns of a terminal ([1], [2])."""
    yield styled(title, "heading")
    figures = [_figure(bar.value) for bar in bars]
    names = [display.safe(bar.name) for bar in bars]
    figure_width = max(map(text_width, figures))
    room = width - figure_width - 2 * GAP
    name_width = min(max(map(text_width, names)), max(NAME_WIDTH_MIN, min(width * 2 // 5, room - BAR_WIDTH_MIN)))
    scale = _Scale.of([_number(bar.value) for bar in bars], max(0, room - name_width))
    for name, figure, bar in zip(names, figures, bars, strict=True):
        number = _number(bar.value)
        drawn = "" if number is None else scale.drawn(number)
        line = f"{fit(name, name_width)}{' ' * (GAP + figure_width - text_width(figure))}{figure}"
        if drawn:
            blocks = styled(drawn.lstrip(" "), "negative" if number is not None and number < 0 else "bar")
            line += " " * (GAP + len(drawn) - len(drawn.lstrip(" "))) + blocks
        yield line


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to bars."""

    console: Console
    width: int
    zero: int
    """The column where bars begin."""
    per_value: Fraction
    """Eighths of a column."""

    @classmethod
    def of(cls, numbers: Sequence[Fraction | None], width: int) -> _Scale:
        # Fractions: a sum may have more digits than a double, and the difference of two may be beyond all of them.
        known = [number for number in numbers if number is not None]
        low, high = min(known, default=Fraction(0)), max(known, default=Fraction(0))
        low, high = min(low, Fraction(0)), max(high, Fraction(0))
        zero = 0
        if low:
            zero = width if not high else min(width - 1, max(1, round(width * -low / (high - low))))
        sides = [Fraction(zero) / -low] if low else []
        sides += [Fraction(width - zero) / high] if high else []
        return cls(Console(width=max(1, width), height=1), width, zero, _EIGHTHS * min(sides, default=Fraction(0)))

    def drawn(self, number: Fraction) -> str:
        """The bar of a value, with the space before it; empty: there is none."""
        if not number or self.width < 2:
            return ""
        length = max(1, floor(abs(number) * self.per_value))
        zero = self.zero * _EIGHTHS
        begin, end = (zero, zero + length) if number > 0 else (zero - length, zero)
        blocks = Blocks(self.width * _EIGHTHS, begin, end, width=self.width)
        (line,) = self.console.render_lines(blocks, pad=False)
        return "".join([segment.text for segment in line]).rstrip()


def _number(value: object) -> Fraction | None:
    return Fraction(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,}"
    if isinstance(value, int) and not isinstance(value, bool):
        shown = f"{value:,}"
        return shown if len(shown) <= FIGURE_WIDTH_MAX else f"{Decimal(value):.5e}"
    return fit(display.safe(_shown(value)), FIGURE_WIDTH_MAX).rstrip()


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: display.NOT_SET, True: "true", False: "false"}[value]
    return value if isinstance(value, str) else str(value)
