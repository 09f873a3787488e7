"""The command line: `python -m pgqueue` and the script `pgqueue`. Needs `pgqueue-sql[cli]`."""

import signal
import sys
from collections.abc import Sequence

from ._files import extra

__all__ = ["main"]

_NEEDED = {"rich", "typer"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        print(f"pgqueue: the command line needs {missing}: {extra('cli')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while the command line is imported
        return 128 + signal.SIGINT
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
