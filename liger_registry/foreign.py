"""Code of others: an end to what does not come back by itself, and the text of whatever it raises."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from liger_registry.errors import PluginWarning, RegistryError

MAX_TEXT = 2000


class TimeUpError(BaseException):
    """Code of others took too long; no ``Exception``, so that a loop of its own which survives all of these ends."""


def told(error: BaseException, catalogued: bool = False) -> str:
    """What an exception is and says, printable and of bounded length, even if its own ``__str__`` raises.

    Args:
        error: the exception.
        catalogued: leave out the class of what this package raises, whose text says all.
    """
    kind = type(error).__name__
    try:
        said = str(error)
    except BaseException as worse:
        said = f"<its text raised {type(worse).__name__}>"
    text = said if catalogued and isinstance(error, RegistryError | TimeUpError) else f"{kind}: {said}"
    text = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """End the block with ``TimeUpError`` after that time, where Python lets one do so.

    That is in the main thread of a system that has interval timers, if nobody else uses SIGALRM. It ends loops of
    Python, sleeps and waits; code of another language that never looks up goes on. Wherever the block still runs after
    half of the time, a warning says what is at work.

    Args:
        seconds: how long the block may take.
        what: what is at work, for the warning and the error.
    """
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(done, seconds / 2, what), daemon=True)
    watcher.start()
    armed = _arm(seconds, what, done)
    try:
        yield
    finally:
        done.set()
        if armed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _watch(done: threading.Event, seconds: float, what: str) -> None:
    if not done.wait(seconds):
        warnings.warn(f"{what} still runs after {seconds:g} s", PluginWarning, stacklevel=1)


def _arm(seconds: float, what: str, done: threading.Event) -> bool:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return False
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0):
        return False

    def end(number: int, frame: FrameType | None) -> None:
        if done.is_set():
            return None
        raise TimeUpError(f"{what} was not done after {seconds:g} s")

    signal.signal(signal.SIGALRM, end)
    # Again and again: what it interrupts may catch everything.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    return True
