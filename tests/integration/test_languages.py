"""The programs of docs/languages.md compile, where there is a toolchain. Each test says what is missing where it is
skipped. `make test-ts` has the TypeScript client, which runs Node and its compiler for ten seconds of CPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.servers.server import ROOT

PAGE = (ROOT / "docs" / "languages.md").read_text(encoding="utf-8")
DESCRIPTORS = str(files("sow.v1") / "descriptors.binpb")
JARS = os.environ.get("SOW_TEST_JARS", "/usr/share/java")
"""Folders with the jars of grpc-java, protobuf-java and what they need."""
SECONDS_MAX = 300
MINUTE = 60


def program(language: str) -> str:
    """The program of the page in a language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def tool(*names: str) -> str:
    """The first of the commands that is there; skips the test without one."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"{' or '.join(names)} is not installed")
    return found


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> None:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, f"{command[0]}:\n{done.stdout[-8_000:]}{done.stderr[-8_000:]}"


def test_the_java_program_compiles(tmp_path: Path) -> None:
    javac, protoc = tool("javac"), tool("protoc")
    plugin = tool("protoc-gen-grpc-java", "grpc_java_plugin")
    jars = [str(jar) for folder in JARS.split(os.pathsep) for jar in Path(folder).glob("*.jar")]
    for name in ("grpc-api", "grpc-stub", "grpc-protobuf", "protobuf"):
        if not any(Path(jar).name.startswith(name) for jar in jars):
            pytest.skip(f"there is no jar of {name} in {JARS}")
    generated, classes = tmp_path / "src", tmp_path / "classes"
    generated.mkdir()
    outputs = [f"--java_out={generated}", f"--grpc-java_out={generated}", f"--plugin=protoc-gen-grpc-java={plugin}"]
    run([protoc, f"--descriptor_set_in={DESCRIPTORS}", *outputs, "sow/v1/types.proto", "sow/v1/sow.proto"], tmp_path)
    # Distributions ship gRPC without the messages of google.rpc.
    shared = Path(str(files("google.rpc") / "status.proto")).parents[2]
    messages = ["google/rpc/error_details.proto", "google/rpc/status.proto"]
    run([protoc, f"--proto_path={shared}", f"--java_out={generated}", *messages], tmp_path)
    (tmp_path / "Orders.java").write_text(program("java"), encoding="utf-8")
    sources = [tmp_path / "Orders.java", *generated.rglob("*.java")]
    run([javac, "-cp", os.pathsep.join(jars), "-d", classes, "-encoding", "UTF-8", *sources], tmp_path)


def test_the_go_program_compiles(tmp_path: Path) -> None:
    go, protoc = tool("go"), tool("protoc")
    tool("protoc-gen-go")
    tool("protoc-gen-go-grpc")
    (options,) = re.findall(r"^\| Go \| `(.+?)` with `M=(.+?)` \|$", PAGE, re.MULTILINE)
    outputs = options[0].replace("$M", options[1]).split()
    (tmp_path / "go.mod").write_text("module shop\n\ngo 1.21\n", encoding="utf-8")
    run([protoc, f"--descriptor_set_in={DESCRIPTORS}", *outputs, "sow/v1/types.proto", "sow/v1/sow.proto"], tmp_path)
    (tmp_path / "main.go").write_text(program("go"), encoding="utf-8")
    try:
        fetched = subprocess.run(
            [go, "mod", "tidy"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=MINUTE
        )
    except subprocess.TimeoutExpired:
        pytest.skip("the modules of gRPC cannot be fetched")
    if fetched.returncode != 0:
        pytest.skip(f"the modules of gRPC cannot be fetched: {fetched.stderr[-200:]}")
    run([go, "vet", "./..."], tmp_path)
