"""Virtual environments of real engines, made once under a cache folder; Unavailable says why one cannot be had."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

CACHE = Path(os.environ.get("PDTRACE_ENGINES") or Path(__file__).parents[2] / ".engines")


class Unavailable(Exception):
    """An engine cannot be installed or run here; the message is the reason."""


def environment(
    name: str, steps: Sequence[Sequence[str]], finish: Callable[[Path], None] = lambda _: None
) -> Path:
    """The Python of the environment of that name; each step is what follows `pip install`.

    `finish` does what pip alone cannot. It is made anew when the steps change. What pip says last is
    the reason when it cannot be made.
    """
    home = CACHE / name
    stamp = home / ".installed"
    wanted = hashlib.sha256(repr((sys.version_info[:2], steps)).encode()).hexdigest()
    python = home / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != wanted:
        CACHE.mkdir(parents=True, exist_ok=True)
        _run(
            [sys.executable, "-m", "venv", "--clear", str(home)], f"{name}: no virtual environment"
        )
        for step in steps:
            pip(python, ["install", *step])
        finish(python)
        stamp.write_text(wanted)
    return python


def pip(python: Path, words: Sequence[str]) -> None:
    """One call of that environment's pip."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", *words]
    _run(command, f"pip {' '.join(words)}")


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(["nice", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no reason given"]
        raise Unavailable(f"{what}: {said[-1].removeprefix('ERROR: ')}")
