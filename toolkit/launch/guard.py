"""How a task script ends: when one rank fails, all stop within seconds, and the cause is said once and last."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import UserError

PATIENCE = 3.0  # seconds that another rank waits for rank 0 to fail of the same before it speaks itself
LOST = ("connection closed by peer", "connection reset", "broken pipe", "connection refused", "gloo", "nccl")


class Terminated(BaseException):
    """SIGTERM came: from the user, or from the launcher because another rank died."""


def guarded(main: Callable[[], None]) -> None:
    """Run a task script's main function and leave the process, with an exit code of 0 or 1.

    A `UserError` is shown as paragraphs, anything else as a traceback: by rank 0, or by the rank that
    only it happened to. A rank that fails because another one is gone speaks when that one could not.
    """
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a launcher that ignores it hands that on
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:
        # A second Ctrl-C, the launcher's own signals: nothing may come between here and the last word.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _leave(error)
    _disconnect()


def lost_peer(error: BaseException) -> bool:
    """Whether this error says only that another rank is gone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return False
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LOST)


def _terminate(number: int, frame: object) -> None:
    raise Terminated


def _last_word(error: BaseException) -> tuple[str, bool]:
    """What to say about the error, and whether it only follows from the end of another rank."""
    # What the run has noted on it: how far it had come.
    where = "".join(f", {note}" for note in getattr(error, "__notes__", []))
    if isinstance(error, UserError):
        return "\n".join(f"error: {message}" for message in error.messages), False
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted{where}.", False
    if isinstance(error, Terminated) and _error_file() is None:
        return f"stopped by SIGTERM{where}.", False
    if isinstance(error, Terminated):
        return (
            f"stopped by SIGTERM{where}: from the user or the scheduler, or from the launcher because another rank "
            "was killed (often: out of memory; the launcher's summary names it)."
        ), True
    if lost_peer(error):
        return (
            f"error: rank {_rank()} lost the connection to another rank{where}: it was killed, or died without a "
            "word (often: out of memory; the launcher's summary names it). All ranks stop."
        ), True
    return "".join(traceback.format_exception(error)).rstrip(), False


def _leave(error: BaseException) -> None:
    """Say what there is to say, and end the process."""
    message, follows = _last_word(error)
    # A rank with a cause of its own speaks before it goes, so what follows from its end need not wait.
    wait = _rank() > 0 and not follows
    speaks = not (wait and _wait_for_word()) and _claim_word()
    if not speaks:
        message, follows = "ended with the rank that failed", True
    _tell_launcher(message, follows)
    if speaks:
        where = f"[rank {_rank()}] " if _rank() else ""
        print(f"{where}{message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: an orderly end would wait for ranks that are gone.
    os._exit(1)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _error_file() -> Path | None:
    """torchrun gives every rank a file for its error, those of one machine and attempt in a common folder."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


def _speaker_file() -> Path | None:
    """Made by the one rank of this machine that says why the job failed."""
    own = _error_file()
    return own.parent.parent / "speaker" if own else None


def _wait_for_word() -> bool:
    """Wait a little for another rank to speak; whether it did."""
    file = _speaker_file()
    if file is None:
        return False
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and not file.exists():
        time.sleep(0.05)
    return file.exists()


def _claim_word() -> bool:
    """Whether this rank is the first to speak, also where several fail in the same moment."""
    file = _speaker_file()
    if file is None:
        return True
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # the launcher has cleared the folder away: better said twice than not at all
    return True


def _tell_launcher(message: str, follows: bool) -> None:
    """Write what torchrun shows for this rank in its summary."""
    file = _error_file()
    if file is None:
        return
    # For torchrun the earliest failure is the root cause, and it may notice a killed rank late.
    timestamp = int(time.time()) + (60 if follows else -1)
    content = {"message": {"message": message, "extraInfo": {"py_callstack": message, "timestamp": timestamp}}}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content), encoding="utf-8")
    except OSError:
        pass  # a summary less, but no second error


def _disconnect() -> None:
    """Leave the group, without waiting for rank 0, which may still be writing or uploading."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        # The interpreter's own way out was seen to abort in a communication thread that outlived its owner.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
