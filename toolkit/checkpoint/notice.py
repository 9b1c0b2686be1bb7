"""Being asked to stop: SIGTERM, Ctrl-C, or the scheduler's SIGUSR1.

A handler only sets a flag. The flag rides on the exchange that every step makes anyway, so that all ranks stop after
the same step, with a checkpoint.
"""

import signal
from types import FrameType, TracebackType
from typing import Self

SIGNALS = tuple(
    number for name in ("SIGTERM", "SIGINT", "SIGUSR1") if (number := getattr(signal, name, None)) is not None
)


class Notice:
    """Context in which signals ask for a stop. A second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def come(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
