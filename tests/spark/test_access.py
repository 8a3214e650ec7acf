"""Jobs against a server that asks for tokens over TLS: what each kind of job needs, and says without it (rule A3)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sow_client import Client, Tls
from tests.support.oracles.access import GUARDED, grant, identity, write_access, write_private
from tests.support.servers.certificates import Authority
from tests.support.servers.server import ServerProcess

NEEDS = {
    # The grants that docs/spark.md names.
    "reader": grant("reader", "orders", "read", "rows = '/id < 3'\nhide = [\"/secret\"]"),
    "follower": grant("follower", "orders", "read consume"),
    "writer": grant("writer", "orders", "publish"),
    "loader": grant("loader", "orders", "load"),
    "nobody": "",
}
ROWS = {"id": 0, "price": 0.5, "secret": "s"}


class Guarded:
    """The server, and the options of each identity of `NEEDS`, by its name."""

    def __init__(self, server: ServerProcess, folder: Path, ca: Path) -> None:
        self.server = server
        self.ca = ca
        self._folder = folder

    def options(self, name: str) -> dict[str, str]:
        path = self._folder / f"{name}.token"
        write_private(path, name + "\n")
        return {"server": self.server.address, "tokenFile": str(path), "tlsCa": str(self.ca), "retryFor": "0s"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder, "ca")
    files = authority.issue("server")
    grants = "".join(identity(name, *([name] if given else [])) + given for name, given in NEEDS.items())
    write_access(folder, grants)
    config = f'{GUARDED}[server.tls]\ncertificate = "{files.certificate}"\nkey = "{files.key}"\n'
    with ServerProcess(folder, config + '[topics.orders]\nkey = ["/id"]\n') as server:
        yield Guarded(server, folder, authority.file)


@pytest.fixture
def root(guarded: Guarded) -> Iterator[Client]:
    with Client(guarded.server.address, tls=Tls(ca=guarded.ca), token="root") as client:
        client.sow_delete("orders", all=True)
        for number in range(5):
            client.publish("orders", {**ROWS, "id": number})
        yield client


def keys(client: Client) -> set[str]:
    return {record.key for record in client.query("orders")}


def test_a_snapshot_needs_read_and_has_what_the_grant_has(spark: SparkSession, guarded: Guarded, root: Client) -> None:
    rows = spark.read.format("sow").options(**guarded.options("reader")).load("orders").collect()
    assert {row["id"] for row in rows} == {0, 1, 2}
    assert "secret" not in rows[0].asDict()


@pytest.mark.long
def test_a_stream_of_changes_needs_read_and_consume(
    spark: SparkSession, guarded: Guarded, root: Client, tmp_path: Path
) -> None:
    source = spark.readStream.format("sow").schema("id long").options(**guarded.options("follower"))
    stream = source.option("startingFrom", "earliest").load("orders")
    query = (
        stream.writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    query.awaitTermination()
    found = {row["id"] for row in spark.read.parquet(str(tmp_path / "out")).collect()}
    assert found >= set(range(5))


@pytest.mark.long
def test_an_append_needs_publish_and_an_overwrite_load(spark: SparkSession, guarded: Guarded, root: Client) -> None:
    rows = spark.range(100, 110).selectExpr("id", "0.5 AS price")
    rows.write.format("sow").options(**guarded.options("writer")).mode("append").save("orders")
    assert keys(root) == {str(number) for number in (*range(5), *range(100, 110))}
    rows.write.format("sow").options(**guarded.options("loader")).mode("overwrite").save("orders")
    assert keys(root) == {str(number) for number in range(100, 110)}


def failure(spark: SparkSession, options: dict[str, str]) -> str:
    """The line of the connector's error."""
    with pytest.raises(PySparkException) as caught:
        spark.read.format("sow").options(**options).load("orders").collect()
    found = re.search(r"SowSourceError: (.*)", str(caught.value))
    assert found is not None, str(caught.value)
    return found[1]


def test_a_job_without_access_says_what_to_mend(spark: SparkSession, guarded: Guarded, root: Client) -> None:
    good = guarded.options("reader")
    assert re.search(r"UNAUTHENTICATED: .*no bearer token; check the option tokenFile", failure(spark, without(good)))
    assert "belongs to no identity" in failure(spark, guarded.options("guessed"))
    assert failure(spark, guarded.options("nobody")).startswith("TOPIC_NOT_FOUND")
    assert re.search(
        r"PERMISSION_DENIED: .*lacks the permission read on orders; `sow auth check`",
        failure(spark, guarded.options("writer")),
    )
    missing = failure(spark, {**good, "tokenFile": "/nowhere/desk.token"})
    assert "cannot read /nowhere/desk.token" in missing
    Path(good["tokenFile"]).chmod(0o644)
    assert "run: chmod 600" in failure(spark, good)
    plain = {name: value for name, value in good.items() if name != "tlsCa"} | {"server": "sow.example:7450"}
    assert "over TLS only" in failure(spark, plain)


def test_a_client_certificate_is_an_identity(spark: SparkSession, tmp_path: Path) -> None:
    """given a server that asks for certificates / when a job shows one / then it reads by the grants of that identity,
    and a job without one does not connect"""
    authority = Authority(tmp_path, "ca")
    own, desk = authority.issue("server"), authority.issue("desk")
    grants = '[[identities]]\nname = "desk"\ncertificate = "CN:desk"\nroles = ["desk"]\n'
    write_access(tmp_path, grants + grant("desk", "orders", "read publish"))
    config = f"""[server.tls]
certificate = "{own.certificate}"
key = "{own.key}"
client_ca = "{authority.file}"
[access]
file = "auth.toml"
[topics.orders]
key = ["/id"]
"""
    with ServerProcess(tmp_path, config) as server:
        options = {"server": server.address, "tlsCa": str(authority.file), "retryFor": "0s"}
        shown = options | {"tlsCertificate": str(desk.certificate), "tlsKey": str(desk.key)}
        spark.range(3).write.format("sow").options(**shown).mode("append").save("orders")
        rows = spark.read.format("sow").schema("id LONG").options(**shown).load("orders").collect()
        assert {row["id"] for row in rows} == {0, 1, 2}
        assert failure(spark, options).startswith("UNREACHABLE")


def without(options: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name != "tokenFile"}
