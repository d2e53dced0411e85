"""pdtrace tells where the time of an LLM request went, and who took it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdtrace.api import Trace

__version__ = "0.1.0"
__all__ = ["__version__", "instrument", "open", "uninstrument"]

# In a wheel the three wings (collectors, schemas, dashboards) lie inside this folder; in a checkout beside it.
_here = Path(__file__).resolve().parent
if not (_here / "collectors").is_dir():
    __path__.append(str(_here.parent))


def open(*paths: str | Path) -> Trace:  # noqa: A001 -- the natural verb: pdtrace.open("logs/")
    """Read files, folders, globs or a .duckdb made by `pdtrace ingest`, and return the Trace over them.

    Raises UnreadableInput or UnknownFormat (both PdtraceError, with a hint) when nothing can be read.
    """
    from pdtrace.api import Trace

    return Trace.read(paths)


def instrument(*arguments: Any, **options: Any) -> None:
    """Record the requests of this serving process (pdtrace.instrumentation.instrument has the options)."""
    from pdtrace import instrumentation

    instrumentation.instrument(*arguments, **options)


def uninstrument() -> None:
    """Write what is left and record nothing more."""
    from pdtrace import instrumentation

    instrumentation.uninstrument()
