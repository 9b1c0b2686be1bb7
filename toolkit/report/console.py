"""What a run says on the screen. Rank 0 speaks for all."""

import os
import sys


def is_speaker() -> bool:
    """True in the one process of the job that prints."""
    return int(os.environ.get("RANK", "0")) == 0


def say(message: str) -> None:
    """Print one line to stderr, on rank 0 only."""
    if is_speaker():
        print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print one line that starts with `warning:`, on rank 0 only."""
    say(f"warning: {message}")
