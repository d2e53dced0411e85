"""Commands that make things to look at: report."""

from __future__ import annotations

import click

from pdtrace._door import open_trace, paths_argument, reading_options, slo_option


@click.command()
@paths_argument
@reading_options
@slo_option
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(),
    help="The .html file to make.",
)
@click.option("--force", is_flag=True, help="Replace the report if it exists.")
def report(paths: tuple[str, ...], output: str, force: bool, slo: str | None,
           since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Write the diagnosis with its pictures as one HTML file that needs no network.

    \b
    pdtrace report logs/ -o report.html
    pdtrace report run.duckdb -o report.html --slo ttft=500ms,tpot=50ms
    """
    from pathlib import Path

    from pdtrace import report as room
    from pdtrace import terminal
    from pdtrace.slo import policy

    limits = policy(slo) if slo is not None else None
    room.check_target(Path(output), force=force)
    with open_trace(paths, since, until, keep_content) as trace:
        room.write(trace.store, output, limits, force=force)
    terminal.show_made(output)
