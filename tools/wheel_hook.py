"""A hook of hatchling: wheels get the pages of `sow help`, and man pages below share/man. Editable installs do not."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Pages(BuildHookInterface[BuilderConfig]):
    """The pages of one wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """As hatchling calls it, before a build."""
        if version == "editable":
            return
        for page in self.config["pages"]:
            build_data["force_include"][f"docs/{page}"] = f"sow_cli/pages/{page}"
        sys.path.insert(0, self.root)
        try:
            from tools import man
        except ModuleNotFoundError:  # in an environment for the build alone, as pip makes one: no man pages
            return
        finally:
            sys.path.remove(self.root)
        folder = tempfile.mkdtemp()
        man.write(Path(folder))
        build_data["shared_data"][folder] = "share/man/man1"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """As hatchling calls it, after a build."""
        for folder in build_data["shared_data"]:
            shutil.rmtree(folder)
