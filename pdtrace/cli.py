"""The command line: options, one call, show. Errors become one line with a hint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from pdtrace import __version__
from pdtrace.errors import PdtraceError

if TYPE_CHECKING:
    from pdtrace.api import Trace

FINE, OUR_ERROR, USAGE, CHECK_FAILED = 0, 1, 2, 3

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


def _trace(
    paths: tuple[str, ...], since: str | None, until: str | None, keep_content: bool
) -> Trace:
    from pdtrace.api import Trace
    from pdtrace.ingest import Options
    from pdtrace.options import parse_instant
    from pdtrace.terminal import progress

    with progress() as report:
        options = Options(
            keep_content=keep_content,
            since_ns=parse_instant(since) if since else None,
            until_ns=parse_instant(until) if until else None,
            progress=report,
        )
        return Trace.read(paths, options)


class _Group(click.Group):
    """Commands in the order of their use, not of the alphabet."""

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
    limits = parse_slo(slo) if slo else None
    diagnosis = run(_trace(paths, since, until, keep_content).store, limits)
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

    terminal.show_explanation(run(_trace(paths, since, until, keep_content).store, request), style)


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

    terminal.show_coverage(room.report(_trace(paths, since, until, keep_content).store), style)


@cli.command()
@click.argument("query")
@_paths
@_reading
@_format("text", "csv", "json", "md")
@click.option(
    "--limit", type=int, default=50, show_default=True, help="Rows to print as text; 0 for all."
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

    rows = run(_trace(paths, since, until, keep_content).store, query, params)
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
    from pdtrace import terminal
    from pdtrace.files import make_store
    from pdtrace.ingest import Options
    from pdtrace.options import parse_instant

    with terminal.progress() as report:
        options = Options(keep_content, parse_instant(since) if since else None,
                          parse_instant(until) if until else None, report)  # fmt: skip
        summary = make_store(list(paths), output, options, force=force)
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

    with demo_folder(output) as folder:
        diagnosis = run(_trace((folder,), None, None, False).store)
    terminal.show_diagnosis(diagnosis, style)


def main() -> None:
    """Run the command line; errors of ours become `error:` and `hint:` lines on stderr."""
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(USAGE)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except PdtraceError as error:
        if "--debug" in sys.argv:
            raise
        click.echo(f"error: {error.message}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(OUR_ERROR)
    except BrokenPipeError:  # `pdtrace ... | head`
        sys.stderr.close()
        sys.exit(FINE)
    sys.exit(code if isinstance(code, int) else FINE)
