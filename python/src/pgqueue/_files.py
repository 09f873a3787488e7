"""Where the SQL files of the extension lie: in the installed package, or in the checkout it is run from."""

from functools import cache
from pathlib import Path

__all__ = ["extension_dir", "extra", "install_script"]


@cache
def extension_dir() -> Path:
    """The directory that holds pgqueue.control, pgqueue--*.sql and pgqueue.sql.

    Raises FileNotFoundError where none of the known places has them.
    """
    here = Path(__file__).resolve()
    places = [here.parent / "_extension", *(parent / "extension" for parent in here.parents[1:5])]
    for place in places:
        if (place / "pgqueue.sql").is_file() or any(place.glob("pgqueue--*.sql")):
            return place
    tried = ", ".join(str(place) for place in places)
    raise FileNotFoundError(f"the SQL files of pgqueue are in none of {tried}; in a checkout, run make")


def install_script() -> Path:
    """The plain SQL that installs pgqueue without `create extension`."""
    return extension_dir() / "pgqueue.sql"


def extra(name: str) -> str:
    """The command that installs an extra of this package: of the checkout, where it is run from one."""
    project = Path(__file__).resolve().parents[2]
    if (project / "pyproject.toml").is_file():
        return f"pip install -e '{project}[{name}]'"
    return f"pip install 'pgqueue[{name}]'"
