"""Being asked to stop: SIGTERM, Ctrl-C, or SIGUSR1, which schedulers send some time ahead.

A handler only sets a flag. The flag rides on the exchange that every step makes anyway, so that all ranks stop after
the same step, with a checkpoint.
"""

import math
import signal
from types import FrameType, TracebackType
from typing import Self

# What ends a process at once until it trains, and what can always wait for the first step.
URGENT, PATIENT = (
    tuple(number for name in names if (number := getattr(signal, name, None)) is not None)  # Windows lacks some
    for names in (("SIGTERM", "SIGINT"), ("SIGUSR1",))
)
ANSWER = 10.0  # seconds beyond the slowest step in which a rank that lives answers


class Notice:
    """Context in which signals ask for a stop: SIGUSR1 from the beginning, the others once there is something to save.

    A second Ctrl-C stops at once.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.slowest = 0.0  # seconds of the slowest step so far
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._listen(PATIENT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def training_begins(self) -> None:
        """From here on every signal waits for the end of a step."""
        self._listen(URGENT)

    @property
    def come(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal is not None

    def patience(self) -> float:
        """How many seconds this rank waits for the others in a step.

        A launcher that finds one rank dead sends SIGTERM to the rest, which must not wait for it until they are killed.
        Before the first step nothing is known of how long they may take.
        """
        return ANSWER + self.slowest if self.come and self.slowest else math.inf

    def _listen(self, numbers: tuple[int, ...]) -> None:
        self._before |= {number: signal.signal(number, self._note) for number in numbers}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
