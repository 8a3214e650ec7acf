"""A server with an access file, and clients that show tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from sow_client import Client
from sow_server.access.audit import Part, path_of
from tests.support.servers.server import ServerProcess

GUARDED: Final = """[server]
auth = "token"
[access]
file = "auth.toml"
audit = "audit.jsonl"
"""
ALL: Final = '["read", "consume", "publish", "delete", "create", "load", "topic-admin", "observe", "operator"]'
ROOT: Final = f"""[[identities]]
name = "root"
token_sha256 = "{hashlib.sha256(b"root").hexdigest()}"
roles = ["root"]
[[roles.root.grants]]
topics = ".*"
allow = {ALL}
"""


def identity(name: str, *roles: str, more: str = "") -> str:
    """An identity of the access file, whose token is its name."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    listed = ", ".join(f'"{role}"' for role in roles)
    return f'[[identities]]\nname = "{name}"\ntoken_sha256 = "{digest}"\nroles = [{listed}]\n{more}\n'


def peer(name: str, topics: str = ".*") -> str:
    """A peer of the access file, whose token is its name."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f'[[peers]]\nname = "{name}"\ntoken_sha256 = "{digest}"\ntopics = "{topics}"\n'


def grant(role: str, topics: str, allow: str, more: str = "") -> str:
    """A grant; `allow` has the actions, separated by spaces."""
    listed = ", ".join(f'"{action}"' for action in allow.split())
    return f"[[roles.{role}.grants]]\ntopics = '{topics}'\nallow = [{listed}]\n{more}\n"


def write_access(folder: Path, text: str) -> None:
    """Writes the access file of a server, with an administrator named root."""
    folder.mkdir(parents=True, exist_ok=True)
    write_private(folder / "auth.toml", ROOT + text)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its user may read."""
    path.touch(0o600)
    path.write_text(text, encoding="utf-8")


def audit_file(folder: Path, part: Part = Part.ADMINISTRATION) -> Path:
    """The file of a part of the audit log of a server that is `GUARDED`."""
    return path_of(folder / "audit.jsonl", part)


def audited(folder: Path, part: Part | None = None) -> list[dict[str, Any]]:
    """The whole lines of a part of its audit log, or of all parts."""
    found: list[dict[str, Any]] = []
    for one in Part if part is None else (part,):
        lines = audit_file(folder, one).read_text(encoding="utf-8").split("\n")[:-1]
        found += [json.loads(line) for line in lines]
    return found


def client_of(server: ServerProcess, name: str) -> Client:
    """A client that shows the token of an identity."""
    return Client(server.address, token=name)
