"""Commands that ask beyond one run: compare, whatif."""

from __future__ import annotations

from typing import Literal

import click

from pdtrace._door import format_option, open_trace, paths_argument, reading_options, slo_option


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@reading_options
@format_option("text", "json", "md")
@slo_option
@click.option("--deployment", "deployments", multiple=True, metavar="NAME[=NAME]",
              help="Compare this deployment of A (with that of B). May be repeated.")  # fmt: skip
@click.option("--same", multiple=True, metavar="CONDITION",
              help="Vouch that a condition which the data do not tell is the same, such as hardware; 'unknown' for all such. May be repeated.")  # fmt: skip
@click.option("--report", "page", metavar="FILE", type=click.Path(), help="Also write it as one .html file, both runs on the same axes.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace that file if it exists.")
def compare(a: str, b: str, style: str, slo: str | None, deployments: tuple[str, ...], same: tuple[str, ...],
            page: str | None, force: bool, since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Set two runs side by side: conditions first, then differences; a winner only where conditions allow.

    \b
    pdtrace compare before/ after/
    pdtrace compare before.duckdb after.duckdb --slo ttft=500ms,tpot=50ms
    pdtrace compare before/ after/ --report difference.html
    pdtrace compare bench_a.json bench_b.json --same hardware --same model
    """
    from pdtrace import terminal
    from pdtrace.compare import compare as run
    from pdtrace.compare import report
    from pdtrace.slo import policy

    limits = policy(slo) if slo is not None else None
    if page:
        from pdtrace import compare_report

        compare_report.check(page, force=force)
    with (
        open_trace((a,), since, until, keep_content) as first,
        open_trace((b,), since, until, keep_content) as second,
    ):
        found = run(first.store, second.store, (a, b), limits, same, deployments)
        if page:
            compare_report.write(found, (first.store, second.store), page, force=force)
    terminal.show_report(found.to_dict(), report(found), style)
    terminal.show_made_too(page)


@click.command()
@paths_argument
@reading_options
@format_option("text", "json", "md")
@click.option("--pd", metavar="P:D", help="Prefill and decode workers of a split, such as 1:3.")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Workers without a split.")
@click.option("--chunk-tokens", type=click.IntRange(min=0), metavar="N",
              help="Token budget of a step; 0 computes prompts whole, in steps of their own.")  # fmt: skip
@click.option("--bandwidth-gbps", "bandwidth", metavar="N[-N]",
              help="Gigabits per second between P and D, or a range; one value is tried down to its half.")  # fmt: skip
@click.option(
    "--latency-ms", type=click.FloatRange(min=0), metavar="N", help="Latency of a transfer."
)
@click.option(
    "--transfer",
    type=click.Choice(["bulk", "layerwise"]),
    help="How KV moves; both where not given.",
)
@click.option(
    "--kv-tokens", type=click.IntRange(min=1), metavar="N", help="KV memory of a worker, in tokens."
)
@click.option(
    "--kv-bytes-per-token",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="KV bytes of a token.",
)
@slo_option
@click.option("--deployment", metavar="NAME", help="Which deployment, where there are several.")
def whatif(paths: tuple[str, ...], style: str, pd: str | None, workers: int | None, chunk_tokens: int | None,
           bandwidth: str | None, latency_ms: float | None, transfer: Literal["bulk", "layerwise"] | None, kv_tokens: int | None,
           kv_bytes_per_token: float | None, slo: str | None, deployment: str | None,
           since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Replay the recorded load on another set-up, if a replay of how it ran proves good enough.

    \b
    pdtrace whatif logs/                     only the self-check: replayed as it ran
    pdtrace whatif logs/ --pd 1:3 --bandwidth-gbps 100 --kv-bytes-per-token 131072 --slo ttft=1s,tpot=50ms
    pdtrace whatif logs/ --chunk-tokens 512
    """
    from pdtrace import terminal
    from pdtrace._whatif_model import Asked
    from pdtrace.options import one_of, parse_range, parse_ratio
    from pdtrace.slo import policy
    from pdtrace.whatif import report
    from pdtrace.whatif import whatif as run

    one_of(pd=pd, workers=workers)
    asked = Asked(
        parse_ratio(pd) if pd else None, workers, chunk_tokens, parse_range(bandwidth) if bandwidth else None,
        latency_ms, kv_tokens, kv_bytes_per_token, transfer,
    )  # fmt: skip
    limits = policy(slo) if slo is not None else None
    with open_trace(paths, since, until, keep_content) as trace:
        found = run(trace.store, paths[0], asked, limits, deployment)
    terminal.show_report(found.to_dict(), report(found), style)
