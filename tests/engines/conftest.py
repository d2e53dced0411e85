"""Real engines, only when asked for: `make test-engines` sets PDTRACE_TEST_ENGINES.

With PDTRACE_TEST_ENGINES=read the captures of the last run are read again instead of made anew.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPTS = CHECKOUT / "examples" / "engines"

collect_ignore_glob = [] if os.environ.get("PDTRACE_TEST_ENGINES") else ["test_*.py"]
if not collect_ignore_glob:
    sys.path[:0] = [str(SCRIPTS), str(Path(__file__).parent)]


@pytest.fixture(scope="session")
def folder() -> Callable[[str], Path]:
    """A folder for a run; it stays, so that one can look at it: build/engines/NAME."""

    def make(name: str) -> Path:
        path = CHECKOUT / "build" / "engines" / name
        if os.environ.get("PDTRACE_TEST_ENGINES") != "read":
            shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, exist_ok=True)
        return path

    return make


@pytest.fixture(scope="session")
def tiny(folder: Callable[[str], Path]) -> Path:
    """The model folder of all engines."""
    import tiny_model

    return tiny_model.make(folder("model"))
