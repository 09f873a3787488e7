"""The SQL files of the extension, in the installed package or in the checkout."""

import re
from functools import cache
from pathlib import Path

__all__ = ["extension_dir", "extra", "install_script"]


@cache
def extension_dir() -> Path:
    """The directory of pgqueue.control, pgqueue--*.sql and pgqueue.sql.

    Raises `FileNotFoundError` if none of the known directories has them.
    """
    here = Path(__file__).resolve()
    places = [here.parent / "_extension", *(parent / "extension" for parent in here.parents[1:5])]
    for place in places:
        if (place / "pgqueue.sql").is_file() or any(place.glob("pgqueue--*.sql")):
            return place
    tried = ", ".join(str(place) for place in places)
    raise FileNotFoundError(f"the SQL files of pgqueue are in none of {tried}; in a checkout, run make")


def install_script() -> str:
    """The SQL that installs pgqueue without `create extension`, in the caller's transaction or as one query.

    It is the file pgqueue.sql without what is meant for psql: its commands, and `begin` and `commit`.
    """
    script = (extension_dir() / "pgqueue.sql").read_text("utf8")
    return re.sub(r"(?m)^(\\set .*|begin;|commit;)$", "", script)


def extra(name: str) -> str:
    """The shell command that installs an extra of this package, from the checkout if the package runs in one."""
    project = Path(__file__).resolve().parents[2]
    if (project / "pyproject.toml").is_file():
        return f"pip install -e '{project}[{name}]'"
    return f"pip install 'pgqueue[{name}]'"
