"""How a task script ends: when one rank fails, all stop within seconds, and the cause is said last."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import UserError

PATIENCE = 3.0  # seconds that a rank waits for another one's word before it speaks itself
LOST = ("connection closed by peer", "connection reset", "broken pipe", "connection refused", "gloo", "nccl")


class Terminated(BaseException):
    """SIGTERM came: from the user, or from the launcher because another rank died."""


def guarded(main: Callable[[], None]) -> None:
    """Run a task script's main function and leave the process, with an exit code of 0 or 1.

    A `UserError` is shown as paragraphs, anything else as a traceback: by rank 0, or by the rank that
    only it happened to.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        main()
    except KeyboardInterrupt:
        _leave("interrupted.", speak=_rank() == 0)
    except SystemExit:
        raise
    except UserError as error:
        _leave("\n".join(f"error: {message}" for message in error.messages), speak=_first_to_speak())
    except Terminated:
        _leave("stopped by SIGTERM.", speak=_rank() == 0 and not _spoken())
    except BaseException as error:
        if lost_peer(error):
            message = (
                f"error: rank {_rank()} lost the connection to another rank, which was killed or died without a "
                "word (often: out of memory). All ranks stop."
            )
            _leave(message, speak=not _wait_for_word())
        _leave(traceback.format_exc().rstrip(), speak=_first_to_speak())
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


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _first_to_speak() -> bool:
    """Rank 0 speaks at once; another rank only when no other one has the same to say."""
    return _rank() == 0 or not _wait_for_word()


def _wait_for_word() -> bool:
    """Wait a little for another rank of this machine to say why it failed; whether it did."""
    end = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < end:
            if _spoken():
                return True
            time.sleep(0.05)
    except Terminated:
        pass
    return _spoken()


def _spoken() -> bool:
    """torchrun gives every rank a file for its error, side by side: whether another rank has written its own."""
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not own:
        return False
    return any(path != Path(own) for path in Path(own).parent.parent.glob("*/error.json"))


def _leave(message: str, speak: bool) -> None:
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if speak and own:
        # torchrun repeats this file's message in its summary.
        content = {
            "message": {"message": message, "extraInfo": {"py_callstack": message, "timestamp": int(time.time())}}
        }
        Path(own).parent.mkdir(parents=True, exist_ok=True)
        Path(own).write_text(json.dumps(content))
    if speak:
        where = f"[rank {_rank()}] " if _rank() else ""
        print(f"{where}{message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: an orderly end would wait for ranks that are gone.
    os._exit(1)


def _disconnect() -> None:
    """Leave together with the other ranks."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        # The interpreter's own way out was seen to abort in a communication thread that outlived its owner.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
