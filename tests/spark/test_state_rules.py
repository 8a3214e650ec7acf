"""The rules of a state on Spark: a store under a fake clock, Python and Java give the same changes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from sow.durations import parse_micros
from tests.support.oracles.state_programs import by_timers, comparable, in_a_store, in_python, program
from tests.support.servers.server import ROOT
from tests.support.stores.stores import SECOND, START
from tools.state_jar import SOURCES, compiled

CASES: Final[list[dict[str, Any]]] = json.loads((ROOT / "tests" / "cases" / "lifetimes.json").read_text())
needs_javac = pytest.mark.skipif(shutil.which("javac") is None, reason="there is no javac to compile the engine with")


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs programs in Java, all in one process."""
    path = compiled(tmp_path_factory.mktemp("classes"), SOURCES, ROOT / "tests" / "spark" / "java")

    def run(programs: list[dict[str, Any]]) -> list[Any]:
        command = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", path, "sow.spark.Programs"]
        lines = "\n".join(map(json.dumps, programs))
        done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return list(map(json.loads, done.stdout.rstrip("\n").split("\n")))

    return run


def plain(told: Any) -> Any:
    """With lists in place of tuples, as JSON has them."""
    return json.loads(json.dumps(told))


def case_program(case: dict[str, Any]) -> dict[str, Any]:
    """A record that is there, if the case has one, and ten seconds later an update."""

    def row(ttl: str | None, mode: str | None, order: int) -> dict[str, Any]:
        ago = ttl is not None and ttl.startswith("at ")
        return {
            "op": "put",
            "payload": json.dumps({"id": 1, "n": order}),
            "key": None,
            "ttl": None if ago else ttl,
            "expire_time_micros": START + parse_micros(str(ttl)[3:]) if ago else None,
            "ttl_mode": mode,
            "only_if": None,
            "only_if_version": None,
            "ord": [order],
        }

    def micros(name: str) -> int | None:
        return parse_micros(case[name]) if name in case else None

    settings = {
        "expiration": case["expiration"],
        "default_ttl_micros": micros("default"),
        "min_ttl_micros": micros("min_ttl"),
        "max_ttl_micros": micros("max_ttl"),
        "tombstones_micros": None,
    }
    batches = [{"now": START, "rows": [row(case["present"], None, 1)] if "present" in case else []}]
    batches.append({"now": START + 10 * SECOND, "rows": [row(case.get("ttl"), case.get("ttl_mode"), 2)]})
    return {"settings": settings, "key": [["id"]], "batches": batches}


def outcome(told: Any) -> str:
    """The expire time of the update from the first instant, as a case names it, or why it was refused."""
    _, _, _, stamp, reason = next(one for one in comparable(told)[1]["1"] if one[1] == '{"id": 1, "n": 2}' or one[4])
    return reason or ("never" if stamp is None else f"{(stamp - START) // SECOND}s")


@pytest.mark.parametrize("case", CASES, ids=[f"{case['rule']}-{at}" for at, case in enumerate(CASES)])
def test_the_table_of_lifetimes(case: dict[str, Any], tmp_path: Path) -> None:
    """L3, L4, L6, L18: in a store, and in Python."""
    made = case_program(case)
    in_store, by_rules = in_a_store(made, tmp_path), in_python(made)
    assert in_store == comparable(by_rules)
    assert outcome(by_rules) == case["expires"]


@needs_javac
def test_the_table_of_lifetimes_in_java(java: Any) -> None:
    made = [case_program(case) for case in CASES]
    for case, told in zip(CASES, java(made), strict=True):
        assert outcome(told) == case["expires"], case


@pytest.mark.parametrize("first", [0, pytest.param(1_000, marks=pytest.mark.long)])
def test_random_programs_are_the_same_in_a_store_and_in_python(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + (2_000 if first else 40)):
        made = program(seed)
        assert comparable(in_python(made)) == in_a_store(made, tmp_path / str(seed)), f"seed {seed}"


@pytest.mark.parametrize("first", [0, pytest.param(1_000, marks=pytest.mark.long)])
def test_timers_expire_each_record_once_and_in_time(first: int) -> None:
    """L9, L10: a timer moves only where its record may fall due before it, and is set again where it came too early."""
    for seed in range(first, first + (5_000 if first else 100)):
        made = program(seed, late=seed % 2 == 1)
        for row in (row for batch in made["batches"] for row in batch["rows"] if row["only_if_version"] == -1):
            row["only_if_version"] = None
        wanted = [{key: some for key, some in batch.items() if key} for batch in in_python(made)]
        assert by_timers(made) == wanted, f"seed {seed}"


@needs_javac
@pytest.mark.parametrize("first", [0, pytest.param(1_000, marks=pytest.mark.long)])
def test_random_programs_are_the_same_in_java_and_in_python(first: int, java: Any) -> None:
    """Also with rows that come late, whose tombstones a store does not have."""
    seeds = range(first, first + (20_000 if first else 300))
    made = [program(seed, late=seed % 2 == 1) for seed in seeds]
    for seed, one, told in zip(seeds, made, java(made), strict=True):
        assert plain(in_python(one)) == told, f"seed {seed}"


def test_versions_grow_over_a_removal_also_when_the_clock_goes_back() -> None:
    """K7: a tombstone has the version of the removal."""
    row = {**case_program(CASES[0])["batches"][1]["rows"][0], "ttl": None}
    made = case_program(CASES[0])
    made["settings"]["tombstones_micros"] = 60 * SECOND
    steps = [(START, "put"), (START, "delete"), (START - SECOND, "put")]
    made["batches"] = [{"now": now, "rows": [{**row, "op": op, "ord": [at]}]} for at, (now, op) in enumerate(steps)]
    assert [batch["1"][0][2] - START for batch in in_python(made)] == [0, 1, 2]


KEYS: Final = [
    *("1", "1.0", "-0.0", "0.1", "1e22", "1.2345678901234568e+20", "123456789012345680000", "1e-7", "2e23", "5e-324"),
    *("2.2250738585072014e-308", "9007199254740993", "9007199254740993.0", "1E5", "123456789.125", "1e16", "1.5e16"),
    *("true", '"true"', '"a|b"', '"a\\\\b"', '"\\u00fc"', '""', "null", "[1]", "{}", '"\\ud800"', "0.00001", "1e300"),
]
"""Values of a key field, as JSON."""


@needs_javac
def test_keys_are_those_of_a_store(java: Any, tmp_path: Path) -> None:
    """K4, K5: whatever form a number has."""
    rows = [
        {**case_program(CASES[0])["batches"][1]["rows"][0], "payload": f'{{"id":{value}}}', "ord": [at], "ttl": None}
        for at, value in enumerate(KEYS)
    ]
    settings = dict.fromkeys(("default_ttl_micros", "min_ttl_micros", "max_ttl_micros", "tombstones_micros"))
    made = {
        "settings": {"expiration": "enabled", **settings},
        "key": [["id"]],
        "batches": [{"now": START, "rows": rows}],
    }
    by_rules = in_python(made)
    assert comparable(by_rules) == in_a_store(made, tmp_path)
    assert plain(by_rules) == java([made])[0]


NESTED: Final = [
    *('{"id":1e400,"id":1,"k":{"n":1}}', '{"id":[1e400],"id":1,"k":{"n":1}}', '{"id":1,"k":{"n":1},"k":{"x":1e400}}'),
    *('{"id":1,"k":1e400}', '{"id":1,"k":-1e400,"k":{"n":1}}', '{"id":1,"k":[{"x":1e400}],"k":{"n":1}}'),
    *('{"id":1,"k":{"n":1,"x":1e400}}', '{"id":1,"k":{"n":1e400},"k":{"n":2}}', '{"id":1,"k":{"n":1},"k":"x"}'),
    *('{"id":1,"k":%s,"k":{"n":1}}' % ("1" * 5_000), '{"x":{"id":1e400},"id":1,"k":{"n":"ü"}}', '{"id":1,"k":[7]}'),
]
"""Documents with the key fields /id and /k/n."""


@needs_javac
def test_values_on_the_way_to_a_key_are_those_of_a_store(java: Any, tmp_path: Path) -> None:
    """K4: a number out of range refuses a document, also in a repeated name, and in the place of a parent."""
    row = {**case_program(CASES[0])["batches"][1]["rows"][0], "ttl": None}
    rows = [{**row, "payload": payload, "ord": [at]} for at, payload in enumerate(NESTED)]
    made = {**case_program(CASES[0]), "key": [["id"], ["k", "n"]], "batches": [{"now": START, "rows": rows}]}
    by_rules = in_python(made)
    assert java([made]) == [plain(by_rules)]
    assert comparable(by_rules) == in_a_store(made, tmp_path)


SINGLE: Final = [
    (json.dumps({"id": "x" * 1_024}), None, ""),
    (json.dumps({"id": "ü" * 513}, ensure_ascii=False), None, "KEY_TOO_LARGE"),
    (json.dumps({"id": "a", "v": "x" * (1 << 20)}), None, "PAYLOAD_TOO_LARGE"),
    (None, "x" * 1_025, "KEY_TOO_LARGE"),
    (None, "a|b", "INVALID_ARGUMENT"),
    (None, "a\\|b\\\\", "RECORD_NOT_FOUND"),
    ('{"id":"a","v":[[{"n":1e400}]]}', None, ""),
    ('{"id":' + "1" * 5_000 + "}", None, "PAYLOAD_MALFORMED"),
    ('{"id":[1e400]}', None, "PAYLOAD_MALFORMED"),
    ("\x00{\x00}", None, "PAYLOAD_MALFORMED"),
]
"""Of a row: the document, or else the key of a touch, and the reason why it is refused."""


@needs_javac
def test_limits_and_odd_keys_are_told(java: Any) -> None:
    """K3, K8: as a server has them by default."""
    plain_row = case_program(CASES[0])["batches"][1]["rows"][0]
    made = []
    for payload, key, _ in SINGLE:
        row = {**plain_row, "op": "put" if payload else "touch", "payload": payload, "key": key, "ttl": None}
        made.append({**case_program(CASES[0]), "batches": [{"now": START, "rows": [row]}]})
    for one, told, (_, _, reason) in zip(made, java(made), SINGLE, strict=True):
        ((change,),) = told[0].values()
        assert change[-1] == reason
        assert plain(in_python(one)) == told


@needs_javac
def test_a_merged_record_has_the_limit_of_payloads(java: Any) -> None:
    half = "x" * (1 << 19)
    row = case_program(CASES[0])["batches"][1]["rows"][0]
    rows = [
        {**row, "op": "delta", "payload": json.dumps({"id": 1, name: half}), "ord": [at], "ttl": None}
        for at, name in enumerate("ab")
    ]
    made = {**case_program(CASES[0]), "batches": [{"now": START, "rows": rows}]}
    told = java([made])
    assert told == [plain(in_python(made))]
    assert [change[-1] for change in told[0][0]["1"]] == ["", "PAYLOAD_TOO_LARGE"]


@needs_javac
def test_rows_of_equal_order_have_one_order(java: Any) -> None:
    """Spark's shuffle keeps none: when a batch was repeated, the state had another record than the topic it feeds."""
    row = case_program(CASES[0])["batches"][1]["rows"][0]
    rows = [
        {**row, "payload": json.dumps({"id": 1, "n": n}), "ord": [5], "ttl": ttl}
        for n in (2, 1)
        for ttl in (None, "1h")
    ]
    made = [{**case_program(CASES[0]), "batches": [{"now": START, "rows": some}]} for some in (rows, rows[::-1])]
    first, second = java(made)
    assert first == second == plain(in_python(made[0])) == plain(in_python(made[1]))
