"""docs/sizing.md: how formulas are fitted, the model of more cores, and the page against the raw figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sizing import FIGURES, FORMULAS, Formula, Kept, Load, Pinned, Point, Sweep, fit, read, to_json
from benchmarks.sweep import POINTS, tables
from sow_cli.bench_plan import Plan

PAGE = Path(__file__).parents[3] / "docs" / "sizing.md"
FORMULA = Formula(
    "publish",
    "µs",
    lambda point: point.cpu_micros.get("publish"),
    {"1": lambda _point: 1.0, "P": lambda point: point.payload_bytes / 1024, "I": lambda point: float(point.indexes)},
)


def point(payload_bytes: int, indexes: int, micros: float) -> Point:
    return Point(1_000, payload_bytes, indexes, 0, 1, False, {"publish": micros}, 1, 1)


def test_a_fit_finds_the_coefficients_of_exact_figures() -> None:
    points = [
        point(kib * 1024, indexes, 5.0 + 2.0 * kib + 3.0 * indexes) for kib in (1, 4, 16) for indexes in (0, 1, 2)
    ]
    found = fit(FORMULA, points)

    assert found.coefficients == pytest.approx({"1": 5.0, "P": 2.0, "I": 3.0})
    assert found.greatest_error == pytest.approx(0.0, abs=1e-9)
    assert found.predict(point(2_048, 3, 0.0)) == pytest.approx(18.0)
    assert str(found) == "| publish | 5 + 2 · P + 3 · I | µs | 0% | 0% |"


def test_no_coefficient_is_negative_and_the_error_is_told() -> None:
    # It falls with the payload, which no sum of positive terms does.
    found = fit(FORMULA, [point(1024, 0, 12.0), point(4096, 0, 10.0), point(16 * 1024, 0, 8.0)])

    assert list(found.coefficients) == ["1"]
    assert 8.0 < found.coefficients["1"] < 12.0
    assert 0.1 < found.greatest_error < 0.3


def test_small_figures_count_as_much_as_large_ones() -> None:
    found = fit(FORMULA, [point(1024, 0, 1.0), point(1024, 0, 1.0), point(1024 * 1024, 0, 1_100.0)])

    assert found.greatest_error < 0.12


def test_points_that_tell_nothing_are_left_out() -> None:
    silent = replace(point(1024, 0, 1.0), cpu_micros={})

    assert fit(FORMULA, [point(1024, 0, 1.0), point(2048, 0, 2.0), silent]).points == 2


@pytest.mark.parametrize(
    ("cores", "elsewhere", "per_second"),
    [
        (1, False, 1e6 / 10),  # all of it on one core
        (2, False, 1e6 / 5),  # two cores, both busy
        (4, False, 1e6 / 4),  # the server's interpreter is the limit
        (1, True, 1e6 / 7),
        (2, True, 1e6 / 4),
        (64, True, 1e6 / 4),
    ],
)
def test_the_rate_ends_where_all_cores_or_one_interpreter_is_busy(
    cores: int, elsewhere: bool, per_second: float
) -> None:
    load = Load("update", server_serial=4.0, server_parallel=3.0, client=3.0)

    assert load.per_second(cores, client_elsewhere=elsewhere) == pytest.approx(per_second)


def test_figures_come_back_from_their_file() -> None:
    sweep = Sweep(
        "a machine",
        [point(160, 1, 2.5)],
        [Pinned(Load("get", 1.0, 2.0, 3.0), {1: 10.0, 2: 20.0})],
        (Kept(160, 10, 1_780, 1_720),),
    )

    assert read(to_json(sweep)) == sweep


def test_the_file_has_points_of_the_sweep_in_its_order() -> None:
    def size(one: Plan | Point) -> tuple[int, int, int, int, int, bool]:
        return (one.records, one.payload_bytes, one.indexes, one.subscribers, one.topics, one.follow_all)

    measured = [size(one) for one in read(FIGURES.read_text()).points]

    assert measured == [size(one) for one in POINTS if size(one) in measured]
    for of, wanted in enumerate(({100_000, 3_000_000}, {64, 16 * 1024}, {0, 4}, {0, 1_000}, {1, 100})):
        assert {one[of] for one in measured} >= wanted


def test_the_page_shows_the_figures_of_the_file() -> None:
    page = PAGE.read_text().splitlines()
    for name, table in tables(read(FIGURES.read_text())).items():
        begin = page.index(table[0])
        assert page[begin : begin + len(table)] == table, f"{name}: `python -m benchmarks.sweep --tables` prints it"


def test_every_formula_has_a_point_for_each_of_its_terms() -> None:
    points = read(FIGURES.read_text()).points
    for formula in FORMULAS:
        known = [one for one in points if formula.figure(one) is not None]
        assert len(known) > len(formula.terms), formula.name
