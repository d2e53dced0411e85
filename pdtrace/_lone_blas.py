"""Keeps numpy's linear algebra on the thread that asks: what is solved here is small.

Several threads share a product of 31 x 16,000 by 16,000 x 7 at eight times the CPU (measured on two busy cores: they
wait for each other by spinning), and how many there are changes the last digit of sums.
"""

from __future__ import annotations

import os
import sys

_THREADS = "OPENBLAS_NUM_THREADS"  # read once, as numpy is loaded


def load() -> None:
    """Load numpy with one thread for linear algebra, unless it is loaded already or the user said how many.

    Only for a process of our own. Processes that it starts are not told.
    """
    if "numpy" in sys.modules or _THREADS in os.environ:
        return
    os.environ[_THREADS] = "1"
    try:
        import numpy  # noqa: F401 -- for what it does when it is loaded
    finally:
        del os.environ[_THREADS]
