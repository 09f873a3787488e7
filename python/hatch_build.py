"""Puts the extension's SQL files into distributions, and the page of PyPI; an editable install reads the checkout."""

import posixpath
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


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


class Page(MetadataHookInterface):
    """The page of PyPI is README.md. Its links lead to the home page, which a release has; else they are only text."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field readme."""
        home = metadata.get("urls", {}).get("Homepage")

        def absolute(link: re.Match[str]) -> str:
            path = posixpath.normpath(f"python/{link[2]}")
            return f"[{link[1]}]({home}/blob/v{metadata['version']}/{path})" if home else link[1]

        text = (Path(self.root) / "README.md").read_text("utf8")
        text = re.sub(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)", absolute, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
