"""OTLP spans to a queryable table: pdtrace and chDB (ClickHouse in process) on the same files, side by side.

Each run is a fresh process, timed from start to end: pdtrace with all that `pdtrace ingest -o` does to read and
deduplicate, chDB with its session and one INSERT. The stages behind the table (identity, phases, views, ...) are
timed apart, as what a whole `pdtrace ingest -o` takes longer (`--table-only` leaves that out).

    python -m bench.ingest                       100,000 spans, median of 3
    python -m bench.ingest --spans 1000000       what the goals are about
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.chdb import run_chdb
from bench.measure import Figure, Run, run, table
from bench.spans import generate


def run_table(source: Path, target: Path) -> None:
    """The collector, the store and the removal of duplicates, without the stages behind them."""
    from pdtrace import _no_pandas

    _no_pandas.leave_out()  # as the command does
    from pdtrace import reading, spans
    from pdtrace.collectors import otlp
    from pdtrace.inputs import expand
    from pdtrace.store import Store

    assert otlp
    store = Store(target)
    inputs = expand([str(source)])
    with store.bulk_load():
        accounts = reading.read_all(inputs, store)
    reading.write_sources(store, accounts)
    spans.deduplicate(store.connection)
    store.execute("CHECKPOINT")
    store.close()


@dataclass
class Result:
    """A run and the bytes that its table takes."""

    run: Run
    bytes: int


def contest(
    folder: Path, kind: str, options: argparse.Namespace
) -> tuple[list[Result], list[Result], list[Result]]:
    """Runs on one kind of file, taken by turns: pdtrace to the table, chDB, all stages of pdtrace."""
    source = folder / {"pb": "otlp.pb", "json": "otlp.jsonl", "files": "pb"}[kind]
    us = [sys.executable, "-m", "bench.ingest", "--run"]
    target, peer = folder / "x.duckdb", folder / "chdb"
    ours: list[Result] = []
    theirs: list[Result] = []
    whole: list[Result] = []
    for number in range(options.repeat):
        target.unlink(missing_ok=True)
        done = run([*us, "table", str(source), str(target)])
        ours.append(Result(done, target.stat().st_size))
        shutil.rmtree(peer, ignore_errors=True)
        done = run([*us, "chdb", str(folder), "json" if kind == "json" else "pb", str(peer)])
        theirs.append(Result(done, int(done.output.split()[-1])))
        if number == 0 and not options.table_only:
            target.unlink()
            done = run([sys.executable, "-m", "pdtrace", "ingest", str(source), "-o", str(target)])
            whole.append(Result(done, target.stat().st_size))
    return ours, theirs, whole


def row(
    label: str, results: list[Result], spans: int, peer: list[Result] | None = None
) -> list[str]:
    def middle(found: list[Result], name: str) -> float:
        return median(getattr(result.run, name) for result in found)

    wall, cpu = middle(results, "wall_s"), middle(results, "cpu_s")
    ratios = [
        f"{middle(peer, n) / middle(results, n):.2f}" if peer else "" for n in ("wall_s", "cpu_s")
    ]
    peak = max(result.run.peak_mb for result in results)
    return [
        label, f"{wall:.2f}", f"{spans / wall:,.0f}", ratios[0], f"{cpu:.2f}", ratios[1], f"{peak:,.0f}",
        f"{results[0].bytes / spans:.1f}",
    ]  # fmt: skip


HEADER = ["", "wall s", "spans/s", "x chDB", "CPU s", "x its CPU", "peak MB", "bytes/span"]


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spans", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--unseen", action="store_true", help="30 more attributes a span under keys never seen"
    )
    parser.add_argument(
        "--table-only", action="store_true", help="do not time the stages behind the table"
    )
    parser.add_argument(
        "--kinds", default="pb,json", help="of pb, json, files (one file a message)"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for the data; used again when it is there"
    )
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        who, *rest = options.run
        if who == "table":
            run_table(Path(rest[0]), Path(rest[1]))
        else:
            run_chdb(Path(rest[0]), rest[1], Path(rest[2]))
        return []
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="pdtrace-bench-") as temporary:
        folder = (options.keep or Path(temporary) / "data").resolve()
        if (folder / "spans").exists():
            spans = int((folder / "spans").read_text())
        else:
            start = time.perf_counter()
            spans = generate(folder, options.spans, unseen=options.unseen)
            (folder / "spans").write_text(str(spans))
            print(f"{spans:,} spans made in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        for kind in options.kinds.split(","):
            ours, theirs, whole = contest(folder, kind, options)
            rows = [HEADER, row("pdtrace, to the table", ours, spans, theirs)]
            rows.append(row("chDB, to the table", theirs, spans))
            if whole:
                rows.append(row("pdtrace ingest, all stages", whole, spans))
            table(f"{spans:,} spans, {kind}, median of {options.repeat}", rows)
            label = f"{spans:,} spans{', keys never seen' if options.unseen else ''}, {kind}"
            figures += _figures(label, rows, kind, unseen=options.unseen)
    return figures


def _figures(label: str, rows: list[list[str]], kind: str, *, unseen: bool) -> list[Figure]:
    """The goals of a table, from its rows of pdtrace and chDB."""
    (_, ours, theirs, *_) = (dict(zip(HEADER, cells, strict=True)) for cells in rows)
    goal = f"{theirs['bytes/span']} (chDB)" if unseen else "80"
    return [
        Figure(f"{label}: spans/s of chDB's", f"{ours['x chDB']}x", "0.6x" if kind == "json" else "0.5x"),
        Figure(f"{label}: peak memory", f"{ours['peak MB']} MB", "1,500 MB"),
        Figure(f"{label}: bytes a span", ours["bytes/span"], goal),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
