"""Commands about the data themselves: query, ingest, sources, schema."""

from __future__ import annotations

import click

from pdtrace._door import (
    complete_query,
    format_option,
    open_trace,
    output_options,
    paths_argument,
    progress,
    read_options,
    reading_options,
    slo_option,
)


@click.command()
@click.argument("query", shell_complete=complete_query)
@paths_argument
@reading_options
@format_option("text", "csv", "json", "md")
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
@slo_option
def query(query: str, paths: tuple[str, ...], style: str, limit: int, params: tuple[str, ...], slo: str | None,
          since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Print the rows of a view, finding or table by name, or of any SELECT.

    \b
    pdtrace query prefill_interference logs/
    pdtrace query "SELECT request, ttft_ms FROM requests ORDER BY ttft_ms DESC LIMIT 10" run.duckdb
    """
    from pdtrace.slo import policy

    limits = policy(slo) if slo is not None else None
    rooms = ("pdtrace.goodput", "pdtrace.queries", "pdtrace._query_rows")
    with open_trace(paths, since, until, keep_content, rooms) as trace:
        from pdtrace import goodput
        from pdtrace._query_rows import show_rows
        from pdtrace.queries import run

        if limits:
            goodput.give(trace.store, limits)
            goodput.judge_streams(trace.store)
        rows = run(trace.store, query, params, limit if style in ("text", "md") else 0)
    show_rows(rows, style, limit)


@click.command()
@paths_argument
@reading_options
@output_options("The .duckdb file to make.")
def ingest(paths: tuple[str, ...], output: str, force: bool,
           since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Read the dumps once into a DuckDB file that every command takes in place of PATH.

    \b
    pdtrace ingest logs/ -o run.duckdb
    pdtrace diagnose run.duckdb
    """
    from dataclasses import replace

    from pdtrace._meanwhile import loading
    from pdtrace.files import make_store
    from pdtrace.ingest import STAGES

    options = read_options(since, until, keep_content)
    with progress() as report, loading(*STAGES, "pdtrace.terminal") as begin:
        options = replace(options, progress=report, recognised=begin)
        summary = make_store(list(paths), output, options, force=force)
    from pdtrace import terminal

    terminal.show_sources_summary(summary, output)


@click.command()
@format_option("text", "json")
def sources(style: str) -> None:
    """List the systems and formats that can be read.

    \b
    pdtrace sources
    """
    from pdtrace import terminal
    from pdtrace.queries import collector_list

    terminal.show_collectors(collector_list(), style)


@click.command()
@click.argument("name", required=False, shell_complete=complete_query)
@format_option("text", "json")
def schema(name: str | None, style: str) -> None:
    """Describe the tables, views and findings, or one of them.

    \b
    pdtrace schema
    pdtrace schema prefill_interference
    """
    from pdtrace import terminal
    from pdtrace.queries import describe

    terminal.show_schema(describe(name), style)
