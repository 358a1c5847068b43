"""The command line. Results go to stdout, messages to stderr; the exit code is 2 for errors and 130 if interrupted."""

import sys
from collections.abc import Sequence
from importlib.metadata import version

from fedveil.checks import check_choice
from fedveil.cli.commands import COMMANDS, usage
from fedveil.errors import FedveilError
from fedveil.signals import INTERRUPTED

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    name, *words = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("", "-h", "--help", "--version", "version"):
        print(version("fedveil") if name.endswith("version") else usage(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    try:
        check_choice("fedveil", "command", name, COMMANDS)
        from fedveil.cli.parser import run_command

        run_command(name, words)
    except BrokenPipeError:  # the reader has closed the pipe, as in `fedveil data list | head -1`
        return 1
    except FedveilError as error:
        print(f"fedveil: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where, message = error.filename or f"fedveil {name}", f"cannot be used: {error.strerror or error}"
        fix = "choose another folder, free up disk space, or change the permissions"
        print(f"fedveil: {FedveilError(str(where), message, fix)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfedveil: stopped; run the same command again to continue", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as end:  # raised for help, for flags that tyro rejects and for a run that was stopped
        return end.code if isinstance(end.code, int) else 0
    return 0
