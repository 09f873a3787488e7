"""Starts a process of a soak."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from soak.actors import main  # noqa: E402

main()
