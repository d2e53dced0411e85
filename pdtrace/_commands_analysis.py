"""Commands that ask one question of the dumps: slow."""

from __future__ import annotations

import click

from pdtrace._door import format_option, open_trace, paths_argument, reading_options, slo_option


@click.command()
@paths_argument
@reading_options
@format_option("text", "json", "md")
@slo_option
@click.option(
    "--where",
    metavar="CONDITION",
    help="SQL condition over a request's columns, such as 'ttft_ms > 2000'.",
)
def slow(paths: tuple[str, ...], style: str, slo: str | None, where: str | None,
         since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Say what sets the slow requests apart from the others: worker, prompt length, time, tenant and more.

    \b
    pdtrace slow logs/                              the slowest tenth by time to first token
    pdtrace slow logs/ --where "ttft_ms > 2000"
    pdtrace slow logs/ --slo ttft=500ms,tpot=50ms   those that miss a limit
    """
    from pdtrace.options import one_of
    from pdtrace.slo import policy

    one_of(slo=slo, where=where)
    limits = policy(slo) if slo is not None else None
    with open_trace(
        paths, since, until, keep_content, ("pdtrace.slow", "pdtrace.terminal")
    ) as trace:
        from pdtrace import slow as room
        from pdtrace import terminal

        answer = room.slow(trace.store, where, limits)
    terminal.show_slow(answer, style)
