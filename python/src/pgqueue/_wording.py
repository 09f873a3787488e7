"""Words in the messages of every part of the package."""

__all__ = ["counted"]


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with the words after it: 1 message, 2 messages. `many` is given if `one` is not all that changes."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
