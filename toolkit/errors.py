"""Errors for people."""

from collections.abc import Iterable


class UserError(Exception):
    """Something that the user can mend. Shown as plain paragraphs on one rank, never as a traceback.

    Each message says what is wrong, where (file:line, column, key, value) and what to do.
    """

    def __init__(self, *messages: str) -> None:
        super().__init__("\n".join(messages))
        self.messages = list(messages)


def raise_all(problems: Iterable[str]) -> None:
    """Raise one `UserError` that holds every problem found, or return when there is none."""
    problems = list(problems)
    if problems:
        raise UserError(*problems)


def nearest(name: str, valid: Iterable[str]) -> str:
    """' Did you mean `x`?' for the closest valid name, or an empty string."""
    from difflib import get_close_matches

    match = get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f" Did you mean `{match[0]}`?" if match else ""
