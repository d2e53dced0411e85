"""Commands that ask about more than one run: compare."""

from __future__ import annotations

import click

from pdtrace._door import format_option, open_trace, reading_options


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@reading_options
@format_option("text", "json", "md")
@click.option(
    "--slo", metavar="LIMITS", help="Limits to judge both by, such as ttft=500ms,tpot=50ms."
)
@click.option("--deployment", "deployments", multiple=True, metavar="NAME[=NAME]",
              help="Compare this deployment of A (with that of B). May be repeated.")  # fmt: skip
@click.option("--same", multiple=True, metavar="CONDITION",
              help="Vouch that a condition which the data do not tell is the same, such as hardware; 'unknown' for all such. May be repeated.")  # fmt: skip
def compare(a: str, b: str, style: str, slo: str | None, deployments: tuple[str, ...], same: tuple[str, ...],
            since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Set two runs side by side: conditions first, then differences; a winner only where conditions allow.

    \b
    pdtrace compare before/ after/
    pdtrace compare before.duckdb after.duckdb --slo ttft=500ms,tpot=50ms
    pdtrace compare bench_a.json bench_b.json --same hardware --same model
    """
    from pdtrace import terminal
    from pdtrace.compare import compare as run
    from pdtrace.compare import report
    from pdtrace.options import parse_slo

    limits = parse_slo(slo) if slo is not None else None
    with (
        open_trace((a,), since, until, keep_content) as first,
        open_trace((b,), since, until, keep_content) as second,
    ):
        found = run(first.store, second.store, (a, b), limits, same, deployments)
    terminal.show_report(found.to_dict(), report(found), style)
