"""Other handlers of a signal for a moment."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def handle(number: signal.Signals, handler: Handler) -> Iterator[None]:
    """Handle a signal in another way; only the main thread gets signals, and nothing happens in others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if before is None else before)  # None: not set by Python
