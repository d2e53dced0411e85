"""Commands that say what the dumps mean: diagnose, explain, coverage, demo."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from pdtrace._door import (
    CHECK_FAILED,
    complete_scenario,
    format_option,
    open_trace,
    paths_argument,
    reading_options,
    slo_option,
)

if TYPE_CHECKING:
    from pdtrace.ingest import Ahead
    from pdtrace.model import SloPolicy
    from pdtrace.store import Questions, Store


@click.command()
@paths_argument
@reading_options
@format_option("text", "json", "md")
@slo_option
@click.option("--check", "checks", multiple=True, metavar="CONDITION",
              help="Exit with 3 unless it holds, such as 'ttft_p95<500ms'. May be repeated.")  # fmt: skip
@click.pass_context
def diagnose(ctx: click.Context, paths: tuple[str, ...], style: str, slo: str | None, checks: tuple[str, ...],
             since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Say where the time went in these dumps, who took it, and what the dumps cannot say.

    \b
    pdtrace diagnose logs/ traces.jsonl.gz
    pdtrace diagnose run.duckdb --format json
    pdtrace diagnose logs/ --slo ttft=500ms,tpot=50ms --check 'attainment>=95%'
    pdtrace diagnose logs/ --slo classes.toml
    """
    from pdtrace.options import parse_check
    from pdtrace.slo import policy

    conditions = [parse_check(text, limited=slo is not None) for text in checks]
    limits = policy(slo) if slo is not None else None
    rooms = ("pdtrace.diagnose", "pdtrace.over_time", "pdtrace.terminal")
    asked = _asked(style, limits)
    with open_trace(paths, since, until, keep_content, rooms, hashed=False, ahead=asked) as trace:
        from pdtrace import terminal
        from pdtrace.diagnose import diagnose as run
        from pdtrace.diagnosis import evaluate
        from pdtrace.over_time import over_time

        diagnosis = run(trace.store, limits)
        series = over_time(trace.store, terminal.chart_cells(style))
    terminal.show_diagnosis(diagnosis, style, series)
    results = [(check, *result) for check in conditions for result in evaluate(diagnosis, check)]
    terminal.show_checks(results)
    if not all(holds for *_, holds in results) or (conditions and not results):
        ctx.exit(CHECK_FAILED)


def _asked(style: str, limits: SloPolicy | None) -> Ahead:
    """What the command will ask of the tables, with its chart."""

    def ahead(store: Store) -> Questions:
        from pdtrace import terminal
        from pdtrace.diagnose import ahead as of_diagnosis
        from pdtrace.over_time import asked

        cells = terminal.chart_cells(style)
        return of_diagnosis(store, limits, [asked(cells)] if cells else [])

    return ahead


@click.command()
@click.argument("request")
@paths_argument
@reading_options
@format_option("text", "json")
def explain(request: str, paths: tuple[str, ...], style: str,
            since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """Tell the story of one request: who saw it, why these records are one request, where its time went.

    \b
    pdtrace explain cmpl-mixed-17-0 logs/
    pdtrace explain slowest logs/
    """
    rooms = ("pdtrace.explain", "pdtrace.terminal")
    with open_trace(paths, since, until, keep_content, rooms, hashed=False) as trace:
        from pdtrace import terminal
        from pdtrace.explain import explain as run

        terminal.show_explanation(run(trace.store, request), style)


@click.command()
@paths_argument
@reading_options
@format_option("text", "json")
def coverage(paths: tuple[str, ...], style: str,
             since: str | None, until: str | None, keep_content: bool, debug: bool) -> None:  # fmt: skip
    """List what the dumps contain, what is missing, and the switch that would add it.

    \b
    pdtrace coverage logs/
    """
    rooms = ("pdtrace.coverage", "pdtrace.terminal")
    with open_trace(paths, since, until, keep_content, rooms, hashed=False) as trace:
        from pdtrace import coverage as room
        from pdtrace import terminal

        terminal.show_coverage(room.report(trace.store), style)


@click.command()
@format_option("text", "json", "md")
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    type=click.Path(),
    help="Also write the dump there, to look at.",
)
@click.option("--scenario", metavar="NAME", shell_complete=complete_scenario,
              help="A simulated run instead of the real one.")  # fmt: skip
@click.option(
    "--shape",
    type=click.Choice(["pdtrace", "vllm", "dynamo"]),
    help="Whose dumps a simulated run leaves; vllm unless told otherwise.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), help="Another run of the scenario; 0 is the first."
)
@click.option("--list", "listed", is_flag=True, help="Name the scenarios.")
@click.option(
    "--report", "page", metavar="FILE", type=click.Path(), help="Also write the report there."
)
def demo(style: str, output: str | None, scenario: str | None, shape: str | None, seed: int | None, listed: bool,
         page: str | None) -> None:  # fmt: skip
    """Diagnose a real vLLM run that ships with pdtrace, or a simulated run whose truth is known.

    \b
    pdtrace demo
    pdtrace demo -o dump/ && pdtrace explain slowest dump/
    pdtrace demo --report report.html
    pdtrace demo --scenario chunked_2048 -o simulated/
    """
    from pdtrace import files, terminal
    from pdtrace.over_time import over_time
    from pdtrace.report import diagnose_and_write

    if listed:
        terminal.show_scenarios(files.scenario_list(), style)
        return
    shown, page = page, os.path.abspath(page) if page else None  # noqa: PTH100 -- the demo is read from another folder
    made = files.any_demo(scenario, shape, seed, output)
    with made as folder, open_trace((folder,)) as trace:
        diagnosis = diagnose_and_write(trace.store, page)
        series = over_time(trace.store, terminal.chart_cells(style))
    terminal.show_diagnosis(diagnosis, style, series)
    terminal.show_made_too(shown)
