"""What a process of our own sets for itself: one thread for linear algebra, memory kept for the next array, a short end."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress

_THREADS = "OPENBLAS_NUM_THREADS"  # read once, as numpy is loaded
# Of glibc's mallopt(3): arrays below this size come from one heap, of which so much is kept when it is free.
_MALLOC = {
    -8: 1,
    -3: 32 * 2**20,
    -1: 128 * 2**20,
}  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD

_kept: list[object] = []
_ends_soon = False


def prepare() -> None:
    """Call it before numpy is loaded, in no process that others have a say in. Processes that it starts are not told.

    What is solved here is small, and several threads that share it wait for each other by spinning: a product of
    31 x 16,000 by 16,000 x 7 took eight times the CPU on two busy cores, and how many there are changes the last digit
    of sums. Arrays of some megabytes that are made and freed in turn go back to the system each time, and each of their
    pages is asked for again at its first touch: of windows of token gaps that was two fifths of the CPU.
    """
    if "numpy" in sys.modules:
        return
    if not any(name.startswith("MALLOC_") for name in os.environ):
        _keep_memory()
    if _THREADS in os.environ:
        return
    os.environ[_THREADS] = "1"
    try:
        import numpy  # noqa: F401 -- for what it does when it is loaded
    finally:
        del os.environ[_THREADS]


def _keep_memory() -> None:
    import ctypes

    with suppress(OSError, AttributeError, TypeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        for option, value in _MALLOC.items():
            set_option(option, value)


def rest_from_cycles() -> None:
    """Let the collector of reference cycles rest in a process that ends soon, by end().

    Modules and SQL leave no cycles worth a search, and it went over all that they made again and again, and once more
    at the end of the interpreter: a tenth of the CPU that a file of 512 requests takes.
    """
    global _ends_soon
    _ends_soon = True
    gc.set_threshold(500_000, 10, 10)
    atexit.register(gc.freeze)


def keep(thing: object) -> bool:
    """Keep what would be taken apart now until it goes with the process; whether that is soon."""
    if _ends_soon:
        _kept.append(thing)
    return _ends_soon


def end(code: int) -> None:
    """End the process that rests from cycles: what is registered for its end is done, its memory goes at once.

    To take modules, rows and DuckDB apart piece by piece before took 45 of the last 108 ms of 100,000 requests. The
    interpreter ends as ever (this returns) where somebody watches it, as a profiler does, or output cannot be written.
    """
    if not _ends_soon or sys.getprofile() or sys.gettrace() or sys.flags.interactive:
        return
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
