"""What the commands share: options, the exit codes, opening what the paths name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pdtrace.api import Trace
    from pdtrace.ingest import Ahead, Options
    from pdtrace.reading import Progress

FINE, OUR_ERROR, USAGE, CHECK_FAILED = 0, 1, 2, 3

paths_argument = click.argument(
    "paths", nargs=-1, required=True, metavar="PATH...", type=click.Path()
)


def format_option(*choices: str) -> Callable[..., Any]:
    """--format with these choices; the first is the default."""
    return click.option(
        "--format", "style", type=click.Choice(choices), default=choices[0], show_default=True,
        help="How to print the result.",
    )  # fmt: skip


def _begins_so(names: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """For the shell's completion: the names that begin as what was typed."""
    return lambda _ctx, _param, typed: sorted(name for name in names() if name.startswith(typed))


def _queries() -> Iterable[str]:
    from pdtrace import library

    return [*library.tables(), *library.queries()]


def _pictures() -> Iterable[str]:
    from importlib.resources import files

    names = [entry.name for entry in files("pdtrace.dashboards").iterdir()]
    return [n.removesuffix(".py") for n in names if n.endswith(".py") and not n.startswith("_")]


def _scenarios() -> Iterable[str]:
    from pdtrace.simulator import SCENARIOS

    return SCENARIOS


complete_query, complete_picture, complete_scenario = map(
    _begins_so, (_queries, _pictures, _scenarios)
)

slo_option = click.option(
    "--slo",
    metavar="LIMITS",
    help="Limits to judge by, such as ttft=500ms,tpot=50ms,itl_p99=100ms, or a .toml file with classes of requests.",
)


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that reads dumps."""
    for option in (
        click.option(
            "--since",
            metavar="TIME",
            help="Only what started at or after this instant (ISO-8601, UTC).",
        ),
        click.option("--until", metavar="TIME", help="Only what started before this instant."),
        click.option(
            "--keep-content", is_flag=True, help="Keep prompt and answer text found in spans."
        ),
        click.option("--debug", is_flag=True, hidden=True),
    ):
        command = option(command)
    return command


def output_options(what: str) -> Callable[..., Any]:
    """-o FILE, which is made, and --force where it may be there already."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option("--force", is_flag=True, help="Replace the file if it exists.")(
            command
        )
        return click.option(
            "-o", "--output", required=True, metavar="FILE", type=click.Path(), help=what
        )(command)

    return add


@contextlib.contextmanager
def open_trace(
    paths: tuple[str, ...],
    since: str | None = None,
    until: str | None = None,
    keep_content: bool = False,
    then: tuple[str, ...] = (),
    *,
    hashed: bool = True,
    ahead: Ahead | None = None,
) -> Iterator[Trace]:
    """What the paths hold, with progress on stderr while it is read.

    `then`: modules that the command needs afterwards; they are loaded meanwhile. `hashed`: whether the command, or who
    asks it, may look at the sha256 of a file that is there alone. `ahead`: what it will ask.
    """
    from dataclasses import replace

    from pdtrace._meanwhile import loading, reading

    with reading(paths, keep_content=keep_content):
        options = read_options(since, until, keep_content)
        from pdtrace.api import Trace
        from pdtrace.ingest import STAGES

        with loading(*STAGES, *then) as begin:
            with progress() as report:
                options = replace(
                    options, progress=report, recognised=begin, hashed=hashed, ahead=ahead
                )
                trace = Trace.read(paths, options)
            with contextlib.nullcontext() if _ends_with_process(trace) else trace:
                yield trace


def _ends_with_process(trace: Trace) -> bool:
    """Whether nothing needs closing: all is memory, and the process ends with the command."""
    from pdtrace import _own_process

    return trace.store.path is None and _own_process.keep(trace)


@contextlib.contextmanager
def progress() -> Iterator[Progress | None]:
    """A progress bar on stderr while files are read; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from pdtrace._stdout import progress_bar

    with progress_bar() as report:
        yield report


def read_options(since: str | None, until: str | None, keep_content: bool) -> Options:
    """The options of reading, from what was typed."""
    from pdtrace import _few_functions, _no_pandas, _own_process

    _own_process.prepare()
    from pdtrace.ingest import Options
    from pdtrace.options import parse_window

    _no_pandas.leave_out()
    _few_functions.make_when_asked()
    since_ns, until_ns = parse_window(since, until)
    return Options(keep_content, since_ns, until_ns)
