"""The contract for other languages: its descriptors, the stubs of the TypeScript client, and docs/languages.md.

tests/integration/test_languages.py compiles the programs of the page, and runs the tests of the client.
"""

from __future__ import annotations

import base64
import re
from importlib.resources import files
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from generate import PACKAGE, descriptors
from sow.v1 import types_pb2
from sow_client.errors import CLASS_OF_REASON
from tests.support.oracles.contract import breaking_changes, undocumented

ROOT = Path(__file__).parents[3]
CLIENT = ROOT / "clients" / "typescript"
PAGE = (ROOT / "docs" / "languages.md").read_text(encoding="utf-8")
PUBLISHED = Path(str(files("sow.v1") / "descriptors.binpb"))


@pytest.fixture(scope="module")
def published() -> FileDescriptorSet:
    return FileDescriptorSet.FromString(PUBLISHED.read_bytes())


def test_the_published_descriptors_have_every_part_and_its_comment(published: FileDescriptorSet) -> None:
    assert breaking_changes(descriptors(), published, package=PACKAGE) == []
    assert undocumented(published, package=PACKAGE) == []


def test_each_file_stands_behind_those_that_it_imports(published: FileDescriptorSet) -> None:
    seen: set[str] = set()
    for file in published.file:
        assert seen.issuperset(file.dependency), file.name
        seen.add(file.name)
    assert {name for name in seen if name.startswith("sow/")} == {file.name for file in published.file} - {
        "google/protobuf/duration.proto",
        "google/protobuf/timestamp.proto",
    }


def test_protoc_generates_from_the_descriptors_alone_as_the_page_says(tmp_path: Path) -> None:
    (command,) = re.findall(r"^    protoc (.*)$", PAGE, re.MULTILINE)
    arguments = [
        word.replace("=descriptors.binpb", f"={PUBLISHED}").replace("_out=.", f"_out={tmp_path}")
        for word in command.split()
    ]
    assert protoc.main(["protoc", *arguments]) == 0
    assert sorted(path.name for path in tmp_path.rglob("*.py")) == ["sow_pb2.py", "types_pb2.py"]


def test_the_page_names_only_reasons_that_exist() -> None:
    rules = PAGE.split("\n## Rules for a client")[1].split("\n## Java")[0]
    codes = {"UNAVAILABLE", "CANCELLED", "UNKNOWN", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"}
    words = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b|\bOVERLOADED\b|\bSTOPPING\b", rules)) - {"UNREACHABLE", "TOKEN"}
    reasons = {value.name.removeprefix("ERROR_REASON_") for value in types_pb2.ErrorReason.DESCRIPTOR.values}
    assert len(words) > 10
    assert words - codes - reasons == set()


def _stubs() -> FileDescriptorSet:
    """The contract that the TypeScript client was generated from: each stub has its file, without names in JSON."""
    result = FileDescriptorSet()
    for stub in sorted((CLIENT / "src" / "gen" / "sow" / "v1").glob("*_pb.ts")):
        (encoded,) = re.findall(r'fileDesc\("([^"]+)"', stub.read_text(encoding="utf-8"))
        padded = encoded + "=" * (-len(encoded) % 4)
        result.file.append(FileDescriptorProto.FromString(base64.b64decode(padded)))
    return result


def test_the_typescript_client_was_generated_from_this_contract_or_an_earlier_one() -> None:
    """`make test-ts` demands this very contract; here a change of the contract needs no Node."""
    stubs = _stubs()
    assert {file.name for file in stubs.file} == {f"sow/v1/{path.name}" for path in PUBLISHED.parent.glob("*.proto")}
    assert breaking_changes(stubs, descriptors(), package=PACKAGE) == []


def test_both_clients_have_the_same_class_for_each_reason() -> None:
    table = (CLIENT / "src" / "errors.ts").read_text(encoding="utf-8").split("export const CLASS_OF_REASON")[1]
    classes = dict(re.findall(r"^  ([A-Z0-9_]+): ([A-Za-z]+),$", table.split("};")[0], re.MULTILINE))
    here = {reason: kind.__name__ for reason, kind in CLASS_OF_REASON.items()}
    assert classes.items() ^ here.items() == set(), (
        "CLASS_OF_REASON in clients/sow_client/errors.py and in clients/typescript/src/errors.ts"
    )


def test_the_lock_file_of_npm_names_no_registry() -> None:
    lock = (CLIENT / "package-lock.json").read_text(encoding="utf-8")
    assert re.findall(r'"resolved"|https?://(?!opencollective|github)[^"]*\.tgz', lock) == []
