"""Commands that make things to look at: report, view."""

from __future__ import annotations

import click

from pdtrace._door import open_trace, output_options, paths_argument, reading_options, slo_option


@click.command()
@paths_argument
@reading_options
@slo_option
@output_options("The .html file to make.")
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
    rooms = ("pdtrace.pictures:views",)
    with room.vega() as scripts, open_trace(paths, since, until, keep_content, rooms) as trace:
        room.write(trace.store, output, limits, scripts=scripts, force=force)
    terminal.show_made(output)


@click.command()
@paths_argument
@reading_options
@slo_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="PORT",
    help="Port; 0 takes a free one.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to bind to. Others than this machine's own are open to the network, behind a token.",
)
@click.option("--open", "show", is_flag=True, help="Open it in a browser.")
def view(paths: tuple[str, ...], port: int, host: str, show: bool, slo: str | None,
         since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Show the dumps as a live page with filters, at an address of this machine, until Ctrl-C.

    \b
    pdtrace view logs/
    pdtrace view run.duckdb --slo ttft=500ms,tpot=50ms --port 8080
    """
    from pdtrace.report import vega
    from pdtrace.slo import policy

    limits = policy(slo) if slo is not None else None
    rooms = ("pdtrace.page", "pdtrace.terminal", "pdtrace.pictures:views")
    with vega() as scripts, open_trace(paths, since, until, keep_content, rooms) as trace:
        from pdtrace import page, terminal

        page.serve(trace.store, " ".join(paths), scripts, terminal.show_address,
                   limits=limits, host=host, port=port, show=show)  # fmt: skip
