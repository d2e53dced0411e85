"""Where results are printed: a console that knows colour and width, text in stdout's encoding, JSON."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from pdtrace._paper import Plain, encodable

if TYPE_CHECKING:
    from rich.console import Console

    from pdtrace.reading import Progress

# By these rich takes a pipe for a terminal.
_AS_TERMINAL = {"FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
PLAIN_WIDTH = 110  # when the output is no terminal


def console(*, stderr: bool = False) -> Console | Plain:
    """What text is printed on; it knows whether it may use colour (terminal, NO_COLOR, FORCE_COLOR) and how wide it is."""
    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdigit() and int(columns) else PLAIN_WIDTH
    tty = stream.isatty()
    if not tty and not _AS_TERMINAL & os.environ.keys():
        return Plain(stream, asked)
    from pdtrace._console import SafeConsole

    return SafeConsole(file=stream, width=None if tty else asked, highlight=False, emoji=False)


def write(text: str) -> None:
    """Text on stdout as it is, in whatever encoding stdout has."""
    sys.stdout.write(encodable(text, sys.stdout.encoding or "utf-8"))


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr while files are read."""
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from pdtrace._console import SafeConsole

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=SafeConsole(file=sys.stderr, highlight=False, emoji=False), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("reading", total=None)

        def report(path: str, done: int, total: int) -> None:
            bar.update(task, description=escape(path[-40:]), completed=done, total=total or None)

        yield report


def print_json(value: object) -> None:
    """JSON on stdout; NaN and infinities become null."""
    data = orjson.dumps(
        _rounded(value), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str
    )
    text = _STEERING.sub(lambda sign: f"\\u{ord(sign.group()):04x}", data.decode())
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.flush()


# JSON escapes the other controls by itself.
_STEERING = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def _rounded(value: Any) -> Any:
    """Floats to 12 significant digits: sums over threads differ behind them from run to run."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
