"""The console script `toolkit`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from toolkit import __version__
from toolkit.errors import UserError, nearest

# Subcommand -> module whose main(argv) runs it, and its line in --help. Imported when called.
COMMANDS = {
    "check": ("toolkit.launch.check", "does an accelerate config fit this machine and these flags?"),
    "checkpoint": ("toolkit.checkpoint.command", "show or verify checkpoints, or export a model from one"),
    "compare": ("toolkit.launch.compare", "which config is faster, which needs less memory? measured on this machine"),
    "generate": ("toolkit.generate", "let a language model go on with a text"),
    "parity": ("toolkit.launch.parity", "is the training the same under every config? on your own task"),
    "predict": ("toolkit.predict", "label texts with a finished run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code; 2 where the user can mend what is wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"toolkit {__version__}")
        return 0
    try:
        if argv[0] not in COMMANDS:
            known = ", ".join(COMMANDS)
            raise UserError(f"toolkit has no command {argv[0]}.{nearest(argv[0], COMMANDS)} Commands: {known}.")
        return import_module(COMMANDS[argv[0]][0]).main(argv[1:]) or 0
    except UserError as error:
        for message in error.messages:
            print(f"error: {message}", file=sys.stderr)
        return 2


def _usage() -> str:
    lines = [f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: toolkit COMMAND …", "", *lines, "", "toolkit COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
