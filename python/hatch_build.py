"""Puts the extension's SQL files into distributions; an editable install reads those of the checkout."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ExtensionFiles(BuildHookInterface[Any]):
    """Works in a checkout, where the files are one level up, and in a source distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add pgqueue.control and extension/ to what is built."""
        if version == "editable":
            return
        here = Path(self.root)
        home = here if (here / "pgqueue.control").exists() else here.parent
        target = "" if self.target_name == "sdist" else "pgqueue/_extension/"
        build_data["force_include"] |= {
            str(home / "pgqueue.control"): f"{target}pgqueue.control",
            str(home / "extension"): "extension" if self.target_name == "sdist" else "pgqueue/_extension",
        }
