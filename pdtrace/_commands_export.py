"""What is handed to other programs: timelines, single pictures."""

from __future__ import annotations

import click

from pdtrace._door import complete_picture, open_trace, paths_argument, slo_option


@click.command()
@paths_argument
@click.option("--perfetto", is_flag=True, help="A timeline that ui.perfetto.dev opens; JSON, gzipped where the name ends in .gz.")  # fmt: skip
@click.option("--picture", metavar="NAME", shell_complete=complete_picture, help="One picture of the report.")  # fmt: skip
@click.option("--list", "listed", is_flag=True, help="Say which pictures there are and what each shows of these data.")  # fmt: skip
@click.option("-o", "--output", metavar="FILE", type=click.Path(), help="The file to make.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--format", "style", type=click.Choice(["png", "svg"]), help="Picture: how to draw it; else as the file's name ends.")  # fmt: skip
@click.option("--theme", type=click.Choice(["light", "dark"]), default="light", show_default=True, help="Picture: on white or on a dark ground.")  # fmt: skip
@click.option("--deployment", metavar="NAME", help="Picture: of which deployment, where there are several.")  # fmt: skip
@slo_option
@click.option("--from", "start", metavar="TIME", help="Timeline: only what touches the time from here on; ISO-8601, or +30s after the first request.")  # fmt: skip
@click.option("--to", "end", metavar="TIME", help="Timeline: and before here.")
@click.option("--request", "requests", multiple=True, metavar="ID", help="Timeline: this request with its tokens, and what ran beside it; also 'slowest'. May be repeated.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=20_000, show_default=True, help="Timeline: requests at most, the first ones; 0 for all.")  # fmt: skip
@click.option("--debug", is_flag=True, hidden=True)
def export(paths: tuple[str, ...], perfetto: bool, picture: str | None, listed: bool, output: str | None, force: bool,
           style: str | None, theme: str, deployment: str | None, slo: str | None, start: str | None, end: str | None,
           requests: tuple[str, ...], limit: int, debug: bool) -> None:  # fmt: skip
    """Write a timeline for Perfetto, or one picture as PNG or SVG.

    \b
    pdtrace export logs/ --perfetto -o trace.json.gz
    pdtrace export logs/ --perfetto --request slowest -o slowest.json
    pdtrace export logs/ --list
    pdtrace export logs/ --picture where_time_goes -o time.png
    """
    from pdtrace import drawing, goodput, perfetto as timelines, terminal  # fmt: skip  # noqa: I001
    from pdtrace.options import one_of
    from pdtrace.slo import policy

    one_of(perfetto="yes" if perfetto else None, picture=picture, list="yes" if listed else None)
    if not listed and (output is None or not (perfetto or picture)):
        raise click.UsageError("say what to export: --perfetto or --picture NAME with -o FILE, or --list")  # fmt: skip
    limits = policy(slo) if slo is not None else None
    with open_trace(paths) as trace:
        goodput.give(trace.store, limits)
        if listed:
            terminal.show_table(drawing.listing(trace.store))
        elif picture:
            drawn = drawing.draw(trace.store, picture, str(output), style=style, theme=theme, deployment=deployment, force=force)  # fmt: skip
            terminal.show_notes([f"made {output}", drawn.sentence or ""])
        else:
            chosen = timelines.Selection(start, end, requests, limit)
            made = timelines.export(trace.store, str(output), chosen, force=force)
            terminal.show_notes([f"made {output}", *made.lines()])
