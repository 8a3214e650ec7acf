"""A state of the world over Spark Connect: a server of Spark, and a client that has no JVM (docs/scale.md)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.spark import cluster_jobs, connect_jobs
from tests.support.servers.server import ServerProcess, free_port, until
from tests.support.servers.spark_cluster import SOURCES, Job, SparkCluster

pytestmark = pytest.mark.long


def test_a_state_is_kept_over_spark_connect(server: ServerProcess, tmp_path: Path) -> None:
    """given a server of Spark Connect with two executors, and a client without a JVM / when it starts a state, stops
    it, starts it with other settings, and reads it / then a topic, a function and a classic session have the same"""
    pytest.importorskip("zstandard", reason="PySpark wants it for Spark Connect")
    work, port = tmp_path / "work", free_port()
    (work / "in").mkdir(parents=True)
    rows = [{"id": 1, "name": "a", "n": 1}, {"id": 2, "name": "b", "n": 2, "_ttl": "1h"}]
    rows += [{"id": 3, "name": "c", "n": 3, "_ttl": "1ms"}]
    (work / "in" / "1.json").write_text("\n".join(map(json.dumps, rows)))
    with server.client() as client, SparkCluster(tmp_path / "spark", local=True) as cluster:
        client.create_topic("connected", key=["/id"], expiration="enabled")
        host = cluster.submit(
            Path(cluster_jobs.__file__),
            *("connect", str(tmp_path / "hosted"), str(work)),
            spark__plugins="org.apache.spark.sql.connect.SparkConnectPlugin",
            spark__connect__grpc__binding__port=str(port),
        )
        until(lambda: (work / "ready").exists() or not host.runs, 300.0, "the server of Spark Connect")
        assert host.runs, host.log[-5_000:]
        program = [sys.executable, connect_jobs.__file__, f"sc://127.0.0.1:{port}", server.address]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "JAVA_HOME": "/nowhere"}
        client_of_spark = Job([*program, "connected", str(work)], environment, tmp_path / "client.log")
        try:
            client_of_spark.ends_well()
        finally:
            client_of_spark.kill9()
            (work / "over").touch()
        host.ends_well()
    answer = json.loads((work / "answer").read_text())
    first, last = answer["batches"]
    assert 0 <= first < last
    assert answer["rows"] == [["1", "a"], ["2", "b"]]
    assert (answer["earlier"], answer["read"]) == (2, 2)
    jvm, key, nothing, foreign, spread = answer["refused"]
    assert jvm.startswith("OPTION_INVALID: option engine: a client of Spark Connect cannot load jvm")
    assert key.startswith("OPTION_INVALID: option key: the state in")
    assert nothing == f"OPTION_INVALID: option checkpoint: {work} has no state of the world"
    assert foreign.startswith("OPTION_INVALID: option query: this session has not started it by start_state")
    assert spread.startswith("UNIMPLEMENTED: Spark Connect has no call for it")
    hosted = json.loads((tmp_path / "hosted").read_text())
    assert hosted["rows"] == answer["rows"]
    assert hosted["refused"].startswith("OPTION_INVALID: option engine: the state in")
