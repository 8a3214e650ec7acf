"""`--param`, as a user types it, against a real server: each command that takes a filter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from tests.support.servers.server import ServerProcess

Run = Callable[..., Result]

ATTACK: Final = "' OR true OR /Name = '"
NAMES: Final = ("O'Brien", ATTACK, "null", "true", "[1]", "5")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = '[topics.cars]\nkey = ["/id"]\nexpiration = "enabled"\n'
    with ServerProcess(tmp_path_factory.mktemp("typed"), config) as made:
        with made.client() as client:
            for number, name in enumerate(NAMES):
                client.publish("cars", {"id": number, "Name": name, "n": number, "sold": number == 3})
        yield made


@pytest.fixture
def run(server: ServerProcess) -> Run:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(sow, ["--server", server.address, *arguments])

    return call


def ids(result: Result) -> list[object]:
    assert result.exit_code == 0, result.output
    return [json.loads(line)["payload"]["id"] for line in result.stdout.splitlines()]


def test_a_variable_of_the_shell_is_a_text_whatever_it_holds(run: Run) -> None:
    for number, name in enumerate(NAMES):
        assert ids(run("query", "cars", "/Name = :name", "--param", f"name={name}")) == [number]


def test_every_other_type_is_json_behind_a_colon(run: Run) -> None:
    assert ids(run("query", "cars", "/n = :n", "--param", "n:=3")) == [3]
    assert ids(run("query", "cars", "/sold = :sold", "--param", "sold:=true")) == [3]
    assert ids(run("query", "cars", "/Name IN :names", "--param", 'names:=["null", "5"]')) == [2, 5]
    assert ids(run("query", "cars", "/n = :n", "--param", "n:=null")) == []
    both = ("--param", "low:=1", "--param", "high:=2")
    assert ids(run("query", "cars", "/n BETWEEN :low AND :high", *both)) == [1, 2]


def test_a_text_that_looks_like_true_is_told(run: Run) -> None:
    found = run("query", "cars", "/sold = :sold", "--param", "sold=true")
    assert ids(found) == []
    assert "the parameter sold is the text 'true'; true itself is --param sold:=true" in found.stderr


def test_every_command_with_a_filter_takes_parameters(run: Run, tmp_path: Path) -> None:
    text, given = "/Name = :name", ("--param", f"name={ATTACK}")
    assert json.loads(run("count", "cars", text, *given).stdout)["count"] == 1
    assert json.loads(run("query", "cars", text, *given, "--count").stdout)["count"] == 1
    assert json.loads(run("query", "cars", text, *given, "--explain").stdout)["matched"] == 1
    assert ids(run("query", "cars", text, *given, "--page", "3")) == [1]
    assert json.loads(run("delete", "cars", "--filter", text, *given, "--dry-run").stdout)["matched"] == 1
    restamped = run("topic", "restamp", "cars", "--clear", "--filter", text, *given, "--dry-run")
    assert json.loads(restamped.stdout)["matched"] == 1
    assert run("export", "cars", str(tmp_path / "cars.ndjson"), "--filter", text, *given).exit_code == 0
    assert len((tmp_path / "cars.ndjson").read_text().splitlines()) == 1
    assert len(run("changes", "cars", text, *given).stdout.splitlines()) == 1
    followed = run("subscribe", "cars", text, *given, "--sow", "--count", "1")
    assert json.loads(followed.stdout.splitlines()[0])["key"] == "1"
    durable = run("subscribe", "cars", text, *given, "--durable", "d", "--from", "earliest", "--count", "1")
    assert json.loads(durable.stdout.splitlines()[0])["key"] == "1"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["name"], "'name' is not NAME=TEXT or NAME:=JSON"),
        (["a b=1"], "'a b=1' is not NAME=TEXT"),
        (["=1"], "is not NAME=TEXT"),
        (["name:=x"], "the value of name is not JSON"),
        (["name:=['a']"], 'a list of texts name:=["a", "b"]'),
        (["name:=NaN"], "NaN is no number of JSON"),
        (["name:={}"], "the value of name is an object"),
        (["name=1", "name=2"], "the parameter name is given twice"),
        (["name=1", "name:=2"], "the parameter name is given twice"),
    ],
)
def test_a_wrong_parameter_is_wrong_usage(run: Run, given: list[str], said: str) -> None:
    result = run("query", "cars", "/Name = :name", *[part for one in given for part in ("--param", one)])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_parameters_that_fit_no_filter_are_told_with_their_names(run: Run) -> None:
    assert "no value is given for the parameter :name at 8" in run("query", "cars", "/Name = :name").stderr
    assert "there is no parameter :nme" in run("query", "cars", "/Name = 'x'", "--param", "nme=x").stderr
    assert "a value of the parameter :nme is given" in run("query", "cars", "--param", "nme=x").stderr
    deleted = run("delete", "cars", "--all", "--force", "--param", "name=x")
    assert deleted.exit_code == 2
    assert "--param is for the parameters of --filter" in deleted.stderr
