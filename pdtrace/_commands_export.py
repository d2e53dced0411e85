"""What is handed to other programs: timelines."""

from __future__ import annotations

import click

from pdtrace._door import open_trace, paths_argument


@click.command()
@paths_argument
@click.option("--perfetto", is_flag=True, help="A timeline that ui.perfetto.dev opens; JSON, gzipped where the name ends in .gz.")  # fmt: skip
@click.option("-o", "--output", required=True, metavar="FILE", type=click.Path(), help="The file to make.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--from", "start", metavar="TIME", help="Timeline: only what touches the time from here on; ISO-8601, or +30s after the first request.")  # fmt: skip
@click.option("--to", "end", metavar="TIME", help="Timeline: and before here.")
@click.option("--request", "requests", multiple=True, metavar="ID", help="Timeline: this request with its tokens, and what ran beside it; also 'slowest'. May be repeated.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=20_000, show_default=True, help="Timeline: requests at most, the first ones; 0 for all.")  # fmt: skip
@click.option("--debug", is_flag=True, hidden=True)
def export(paths: tuple[str, ...], perfetto: bool, output: str, force: bool, start: str | None, end: str | None,
           requests: tuple[str, ...], limit: int, debug: bool) -> None:  # fmt: skip
    """Write the run as a timeline: workers, requests, engine steps, KV movements, load over time.

    \b
    pdtrace export logs/ --perfetto -o trace.json.gz
    pdtrace export logs/ --perfetto --request slowest -o slowest.json
    pdtrace export logs/ --perfetto --from +30s --to +40s -o part.json.gz
    """
    from pdtrace import perfetto as room
    from pdtrace import terminal

    if not perfetto:
        raise click.UsageError("say what to export: --perfetto")
    chosen = room.Selection(start, end, requests, limit)
    with open_trace(paths) as trace:
        timeline = room.export(trace.store, output, chosen, force=force)
    terminal.show_notes([f"made {output}", *timeline.lines()])
