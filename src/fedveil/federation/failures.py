"""Report a client's unexpected errors in its own stderr, because replies and logs may reach the server."""

import contextlib
import sys
import traceback
from collections.abc import Iterator

from fedveil.errors import AnalysisError, BadArgument, FedveilError


@contextlib.contextmanager
def hide_failures() -> Iterator[None]:
    """Replace an unexpected error in a model or defence with one that reveals nothing about the records.

    The original error, whose text may contain values from records, is printed to stderr and kept as the cause.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, FedveilError) and not isinstance(error, AnalysisError):
            raise  # an analysis of a batch may quote the sizes of records
        traceback.print_exc(file=sys.stderr)
        what = f"this client cannot answer: {type(error).__name__}"
        raise BadArgument("ask", what, "look for the cause in the client's log") from error


def print_failure(what: str) -> None:
    """Print the current exception to stderr. Loggers are not used, because engines may send logs to the server.

    Errors while printing are ignored; otherwise, the server would learn that something was printed.
    """
    with contextlib.suppress(Exception):
        print(f"fedveil: {what}", file=sys.stderr)
        traceback.print_exc(file=sys.stderr)
