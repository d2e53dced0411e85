"""The command line: options, one call, show. Errors become one line with a hint."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

import click

from pdtrace import __version__
from pdtrace.errors import REPORT, BadOption, PdtraceError, in_one_line, printable

if TYPE_CHECKING:
    from pdtrace.api import Trace
    from pdtrace.ingest import Options

FINE, OUR_ERROR, USAGE, CHECK_FAILED = 0, 1, 2, 3
INTERRUPTED, TERMINATED = 130, 143  # 128 + the signal, as shells say it

_paths = click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path())


def _format(*choices: str) -> Callable[..., Any]:
    return click.option(
        "--format", "style", type=click.Choice(choices), default=choices[0], show_default=True,
        help="How to print the result.",
    )  # fmt: skip


def _reading(command: Callable[..., Any]) -> Callable[..., Any]:
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


@contextlib.contextmanager
def _trace(
    paths: tuple[str, ...],
    since: str | None = None,
    until: str | None = None,
    keep_content: bool = False,
) -> Iterator[Trace]:
    from dataclasses import replace

    from pdtrace.api import Trace
    from pdtrace.terminal import progress

    options = _options(since, until, keep_content)
    with progress() as report:
        trace = Trace.read(paths, replace(options, progress=report))
    with trace:
        yield trace


def _options(since: str | None, until: str | None, keep_content: bool) -> Options:
    from pdtrace import _no_pandas
    from pdtrace.ingest import Options
    from pdtrace.options import parse_window

    _no_pandas.leave_out()
    since_ns, until_ns = parse_window(since, until)
    return Options(keep_content, since_ns, until_ns)


class _PipeClosed(Exception):
    """Nobody reads the output any more; click itself would end with 1."""


class _Group(click.Group):
    """Commands in the order of their use, not of the alphabet."""

    def invoke(self, ctx: click.Context) -> Any:
        """Keep a closed pipe out of click's hands."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _PipeClosed from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='Shell completion: eval "$(_PDTRACE_COMPLETE=bash_source pdtrace)"  (zsh_source, fish_source likewise)',
)
@click.version_option(__version__, prog_name="pdtrace")
def cli() -> None:
    """Where the time of an LLM request went, and who took it.

    Reads what vLLM, NVIDIA Dynamo and OpenTelemetry leave behind (logs, traces, metrics, bench files, tables).

    \b
    pdtrace diagnose logs/              the diagnosis of a folder of dumps
    pdtrace diagnose requests.csv       the same from a table of requests
    pdtrace demo                        the diagnosis of a real vLLM run that ships with pdtrace
    """


@cli.command()
@_paths
@_reading
@_format("text", "json", "md")
@click.option("--slo", metavar="LIMITS", help="Limits to judge by, such as ttft=500ms,tpot=50ms.")
@click.option("--check", "checks", multiple=True, metavar="CONDITION",
              help="Exit with 3 unless it holds, such as 'ttft_p95<500ms'. May be repeated.")  # fmt: skip
@click.pass_context
def diagnose(ctx: click.Context, paths: tuple[str, ...], style: str, slo: str | None, checks: tuple[str, ...],
             since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Say where the time went in these dumps, who took it, and what the dumps cannot say.

    \b
    pdtrace diagnose logs/ traces.jsonl.gz
    pdtrace diagnose run.duckdb --format json
    pdtrace diagnose logs/ --slo ttft=500ms,tpot=50ms --check 'ttft_p95<500ms'
    """
    from pdtrace import terminal
    from pdtrace.diagnose import diagnose as run
    from pdtrace.diagnose import evaluate
    from pdtrace.options import parse_check, parse_slo

    conditions = [parse_check(text) for text in checks]
    limits = parse_slo(slo) if slo is not None else None
    with _trace(paths, since, until, keep_content) as trace:
        diagnosis = run(trace.store, limits)
    terminal.show_diagnosis(diagnosis, style)
    results = [(check, *result) for check in conditions for result in evaluate(diagnosis, check)]
    terminal.show_checks(results)
    if not all(holds for *_, holds in results) or (conditions and not results):
        ctx.exit(CHECK_FAILED)


@cli.command()
@click.argument("request")
@_paths
@_reading
@_format("text", "json")
def explain(request: str, paths: tuple[str, ...], style: str,
            since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Tell the story of one request: who saw it, why these records are one request, where its time went.

    \b
    pdtrace explain cmpl-mixed-17-0 logs/
    pdtrace explain slowest logs/
    """
    from pdtrace import terminal
    from pdtrace.explain import explain as run

    with _trace(paths, since, until, keep_content) as trace:
        terminal.show_explanation(run(trace.store, request), style)


@cli.command()
@_paths
@_reading
@_format("text", "json")
def coverage(paths: tuple[str, ...], style: str,
             since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """List what the dumps contain, what is missing, and the switch that would add it.

    \b
    pdtrace coverage logs/
    """
    from pdtrace import coverage as room
    from pdtrace import terminal

    with _trace(paths, since, until, keep_content) as trace:
        terminal.show_coverage(room.report(trace.store), style)


@cli.command()
@click.argument("query")
@_paths
@_reading
@_format("text", "csv", "json", "md")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Rows to print as text; 0 for all.",
)
@click.option(
    "--param", "params", multiple=True, metavar="NAME=VALUE", help="Parameter of a named query."
)
def query(query: str, paths: tuple[str, ...], style: str, limit: int, params: tuple[str, ...],
          since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Print the rows of a view, finding or table by name, or of any SELECT.

    \b
    pdtrace query prefill_interference logs/
    pdtrace query "SELECT request, ttft_ms FROM requests ORDER BY ttft_ms DESC LIMIT 10" run.duckdb
    """
    from pdtrace import terminal
    from pdtrace.queries import run

    with _trace(paths, since, until, keep_content) as trace:
        rows = run(trace.store, query, params, limit if style in ("text", "md") else 0)
    terminal.show_rows(rows, style, limit)


@cli.command()
@_paths
@_reading
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(),
    help="The .duckdb file to make.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def ingest(paths: tuple[str, ...], output: str, force: bool,
           since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Read the dumps once into a DuckDB file that every command takes in place of PATH.

    \b
    pdtrace ingest logs/ -o run.duckdb
    pdtrace diagnose run.duckdb
    """
    from dataclasses import replace

    from pdtrace import terminal
    from pdtrace.files import make_store

    options = _options(since, until, keep_content)
    with terminal.progress() as report:
        summary = make_store(list(paths), output, replace(options, progress=report), force=force)
    terminal.show_sources_summary(summary, output)


@cli.command()
@_format("text", "json")
def sources(style: str) -> None:
    """List the systems and formats that can be read.

    \b
    pdtrace sources
    """
    from pdtrace import terminal
    from pdtrace.queries import collector_list

    terminal.show_collectors(collector_list(), style)


@cli.command()
@click.argument("name", required=False)
@_format("text", "json")
def schema(name: str | None, style: str) -> None:
    """Describe the tables, views and findings, or one of them.

    \b
    pdtrace schema
    pdtrace schema prefill_interference
    """
    from pdtrace import terminal
    from pdtrace.queries import describe

    terminal.show_schema(describe(name), style)


@cli.command()
@_format("text", "json", "md")
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    type=click.Path(),
    help="Also copy the dump there, to look at.",
)
def demo(style: str, output: str | None) -> None:
    """Diagnose a real vLLM run that ships with pdtrace.

    \b
    pdtrace demo
    pdtrace demo -o dump/ && pdtrace explain slowest dump/
    """
    from pdtrace import terminal
    from pdtrace.diagnose import diagnose as run
    from pdtrace.files import demo_folder

    with demo_folder(output) as folder, _trace((folder,)) as trace:
        diagnosis = run(trace.store)
    terminal.show_diagnosis(diagnosis, style)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; errors of ours become `error:` and `hint:` lines on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # no ASCII terminal stops a report
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if debug:
        logger = logging.getLogger("pdtrace")
        logger.handlers = [logging.StreamHandler(sys.stderr)]
        logger.setLevel(logging.DEBUG)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    sys.exit(_run(words, debug=debug))


def _run(words: list[str], *, debug: bool) -> int:
    try:
        code = cli.main(words, prog_name="pdtrace", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except (BrokenPipeError, _PipeClosed):  # `pdtrace ... | head`
        _mute(sys.stdout)
        return FINE
    except BaseException as error:  # a panic in a Rust library is no Exception
        if isinstance(error, SystemExit | GeneratorExit) or debug:
            raise
        return _told(error)
    return code if isinstance(code, int) else FINE


def _told(error: BaseException) -> int:
    """Say in one line what went wrong and in another how to go on; the exit code."""
    message, hint = _sentence(error)
    for label, text in (("error", message), ("hint", hint)):
        if text:
            click.echo(f"{label}: {printable(' '.join(text.split()))}", err=True)
    return USAGE if isinstance(error, BadOption) else OUR_ERROR


def _sentence(error: BaseException) -> tuple[str, str]:
    if isinstance(error, PdtraceError):
        return error.message, error.hint
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return (
            f"{where}{error.strerror or error}",
            "free space or give another path, and run it again",
        )
    if isinstance(error, MemoryError):
        return (
            "out of memory",
            "give fewer files at once, or `pdtrace ingest` them into a file first",
        )
    return f"pdtrace failed: {in_one_line(error)}", REPORT


def _mute(stream: IO[str]) -> None:
    """Send what is still buffered nowhere, so that the interpreter's own flush at exit stays silent."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _terminated(*_: object) -> None:
    """SIGTERM ends the program as an exit does, so that unfinished files are removed."""
    sys.exit(TERMINATED)
