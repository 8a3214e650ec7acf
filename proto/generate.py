"""Regenerates the stubs of `sow.v1` beside their .proto files, with the generators of this interpreter's environment.

    python proto/generate.py             write *_pb2.py, *_pb2.pyi, *_pb2_grpc.py, *_pb2_grpc.pyi, descriptors.binpb
    python proto/generate.py --check     write nothing; exit 1 and name the files that differ
    python proto/generate.py --release   write proto/release/sow_v1.binpb, the contract that later versions must keep

The bytes depend on the generators' versions. Therefore pyproject.toml pins grpcio-tools and mypy-protobuf exactly.

`descriptors.binpb` is the contract for other languages (docs/languages.md): the files of sow.v1 with their comments,
and those that they import.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

PACKAGE = "sow.v1"
PROTO_ROOT = Path(__file__).resolve().parent
RELEASE_DESCRIPTORS = PROTO_ROOT / "release" / "sow_v1.binpb"
_GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi", "descriptors.binpb")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Regenerate the stubs of sow.v1.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing, exit 1 if a committed stub differs")
    mode.add_argument("--release", action="store_true", help="write the descriptors of the release")
    options = parser.parse_args(arguments)
    if options.release:
        RELEASE_DESCRIPTORS.parent.mkdir(exist_ok=True)
        RELEASE_DESCRIPTORS.write_bytes(descriptors().SerializeToString(deterministic=True))
        print(f"wrote {RELEASE_DESCRIPTORS.relative_to(PROTO_ROOT.parent)}")
        return 0
    committed = {path.relative_to(PROTO_ROOT): path.read_bytes() for path in _generated_files(PROTO_ROOT)}
    with tempfile.TemporaryDirectory() as directory:
        fresh_root = Path(directory)
        _generate(fresh_root)
        fresh = {path.relative_to(fresh_root): path.read_bytes() for path in _generated_files(fresh_root)}
    differing = sorted(name for name in committed.keys() | fresh.keys() if committed.get(name) != fresh.get(name))
    if options.check:
        for name in differing:
            print(f"differs from what its .proto generates: proto/{name.as_posix()}", file=sys.stderr)
        if differing:
            print("run `make proto`", file=sys.stderr)
        return 1 if differing else 0
    for name in differing:
        _write(PROTO_ROOT / name, fresh.get(name))
    print(f"{len(fresh)} files, {len(differing)} changed")
    return 0


def descriptors(*, with_comments: bool = False) -> FileDescriptorSet:
    """The contract as protoc sees it, with its imports, and with its comments on request."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "descriptors.binpb"
        comments = ["--include_source_info"] if with_comments else []
        _protoc([f"--descriptor_set_out={target}", "--include_imports", *comments])
        return FileDescriptorSet.FromString(target.read_bytes())


def published_descriptors() -> FileDescriptorSet:
    """The contract as other languages get it: each file behind those that it imports."""
    result = descriptors(with_comments=True)
    for file in result.file:
        places = [place for place in file.source_code_info.location if place.leading_comments]
        file.ClearField("source_code_info")
        if file.package == PACKAGE:  # the comments of the imported files are not ours
            file.source_code_info.location.extend(places)
    return result


def _generate(target: Path) -> None:
    _protoc(
        [
            f"--python_out={target}",
            f"--grpc_python_out={target}",
            # The plugins are scripts of the environment, found by path: its bin directory need not be on PATH.
            f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy')}",
            f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc')}",
            f"--mypy_out={target}",
            f"--mypy_grpc_out={target}",
        ]
    )
    published = target / "sow" / "v1" / "descriptors.binpb"
    published.write_bytes(published_descriptors().SerializeToString(deterministic=True))


def _protoc(options: Sequence[str]) -> None:
    # Relative names, because they become part of the descriptors.
    sources = sorted(path.relative_to(PROTO_ROOT).as_posix() for path in PROTO_ROOT.glob("sow/v*/*.proto"))
    includes = [f"--proto_path={PROTO_ROOT}", f"--proto_path={files('grpc_tools') / '_proto'}"]
    status = protoc.main(["protoc", *includes, *options, *sources])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}; its messages are above")


def _plugin(name: str) -> str:
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        raise SystemExit(f"{name} is not installed beside {Path(sys.executable).name}: run through `make proto`")
    return path


def _generated_files(root: Path) -> set[Path]:
    return {path for pattern in _GENERATED for path in (root / "sow").rglob(pattern)}


def _write(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()  # its .proto is gone
    else:
        path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
