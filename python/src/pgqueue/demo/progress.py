"""Displays the progress of the demo."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class ProgressDisplay:
    """Progress bars on a terminal, lines of text elsewhere."""

    def __init__(self, records: int, failing: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.start = time.monotonic()
        self._line_at = 0.0
        self._progress: Progress | None = None
        totals = {"enqueued": records, "processed": records, "in backoff": failing, "dead letters": failing}
        if self.console.is_interactive and not self.console.is_dumb_terminal:
            self._progress = Progress(
                TextColumn("{task.description:>12}"),
                BarColumn(40),
                TextColumn("{task.fields[value]:>8}"),
                console=self.console,
                refresh_per_second=8,
            )
            self._tasks: dict[str, TaskID] = {
                name: self._progress.add_task(name, total=max(total, 1), value="0") for name, total in totals.items()
            }

    def __enter__(self) -> "ProgressDisplay":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def log(self, text: str) -> None:
        """Print a line with the time since the start in seconds."""
        self.console.print(f"[dim]{time.monotonic() - self.start:5.1f} s[/]  {text}")

    def show(self, values: dict[str, int], now: bool = False) -> None:
        """Update the bars. Without bars, print a line if the last one is two seconds old, or if `now` is true."""
        if self._progress:
            for name, value in values.items():
                self._progress.update(self._tasks[name], completed=value, value=f"{value:,}")
        elif now or time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + 2
            self.log(", ".join(f"{name} {value:,}" for name, value in values.items()))
