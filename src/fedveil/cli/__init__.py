"""The command line: results to stdout, messages to stderr; exit code 0, 2 for misuse, 130 if stopped."""

import sys
from collections.abc import Sequence
from importlib.metadata import version

from fedveil.checks import one_of
from fedveil.cli.commands import COMMANDS, usage
from fedveil.cli.stops import INTERRUPTED, Stop
from fedveil.errors import FedveilError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code."""
    name, *words = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("", "-h", "--help", "help", "--version", "version"):
        print(version("fedveil") if name.endswith("version") else usage(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    try:
        one_of("fedveil", "command", name, COMMANDS)
        from fedveil.cli.flags import run_command

        run_command(name, words)
    except BrokenPipeError:  # fedveil data list | head -1
        return 1
    except (FedveilError, OSError) as error:
        if isinstance(error, OSError):
            where, why = str(error.filename or f"fedveil {name}"), error.strerror or error
            error = FedveilError(
                where, f"cannot be used: {why}", "choose another folder, free space or change permissions"
            )
        print(f"fedveil: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as end:
        stop = end if isinstance(end, Stop) else Stop("run the same command again to continue", INTERRUPTED)
        print(f"\nfedveil: stopped; {stop.what}", file=sys.stderr)
        return stop.code
    except SystemExit as end:  # help, and flags that tyro refuses
        return end.code if isinstance(end.code, int) else 0
    return 0
