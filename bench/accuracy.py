"""How right the interference detectors are, against the simulator's truth; goals beside figures.

python -m bench.accuracy                     50 seeds x all scenarios on two processes
python -m bench.accuracy --seeds 4 --each    a quick look, scenario by scenario
python -m bench.accuracy --check             exit status 1 where a goal is missed
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context

import polars as pl

from bench.judged import judge
from bench.measure import table
from pdtrace.simulator import SCENARIOS

MATERIAL, LARGE = 0.02, 0.10  # of decode time
OTHERS = (
    "misspecified",
    "late",
    "early",
    "preemption",
)  # scenarios beside positives, nulls and adversaries


@dataclass(frozen=True)
class Goal:
    """A figure with its limit: at least (recall and the like) or at most (errors); None is shown."""

    level: str
    what: str
    value: float | None
    cases: int
    least: float | None = None
    most: float | None = None

    @property
    def missed(self) -> bool:
        """A figure that is not there misses its goal too."""
        if self.least is None and self.most is None:
            return False
        if self.value is None:
            return True
        low = self.least is not None and self.value < self.least
        return low or (self.most is not None and self.value > self.most)

    def row(self) -> list[str]:
        """Cells of the table."""
        limit = ""
        if self.least is not None:
            limit = f">= {100 * self.least:g} %"
        elif self.most is not None:
            limit = f"<= {100 * self.most:g} %"
        shown = "-" if self.value is None else f"{100 * self.value:.2f} %"
        verdict = ("MISSED" if self.missed else "ok") if limit else ""
        return [self.level, self.what, shown, limit, str(self.cases), verdict]


def measured(seeds: int, names: list[str], jobs: int) -> pl.DataFrame:
    """All rows of all runs."""
    work = [(name, seed) for seed, name in product(range(seeds), names)]
    fresh = get_context("spawn")  # the threads of Polars do not survive a fork
    with ProcessPoolExecutor(jobs, fresh) as pool:
        found = pool.map(judge, *zip(*work, strict=True), chunksize=4)
        rows = [row for part in found for row in part]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    missing = [c for c in EVENTS if c not in frame.columns]
    return frame.with_columns(pl.lit(None, pl.Float64).alias(c) for c in missing).with_columns(
        error=((pl.col("lost_s") - pl.col("true_s")) / pl.col("true_s")).abs(),
        bias=(pl.col("lost_s") - pl.col("true_s")) / pl.col("true_s"),
        covered=(pl.col("lost_low_s") <= pl.col("true_s"))
        & (pl.col("true_s") <= pl.col("lost_high_s")),
        dirty=pl.col("scenario").str.ends_with("dirty"),
        flagged=pl.col("flagged").fill_null(value=False),
        silent=pl.col("flagged").is_null(),
    )


EVENTS = ("events_true", "events_called", "events_found", "events_right", "culprit_mass")


def goals(rows: pl.DataFrame) -> list[Goal]:
    """The goals of all levels, then what has none."""
    found: list[Goal] = []
    for level, recall, false, share in (
        ("A", 0.99, 0.005, MATERIAL), ("B", 0.98, 0.01, MATERIAL), ("C", 0.90, 0.01, LARGE),
    ):  # fmt: skip
        mine = rows.filter(pl.col("level") == level)
        positive = mine.filter((pl.col("kind") == "positive") & (pl.col("share") >= share))
        null = mine.filter(pl.col("kind") == "null")
        found += [
            Goal(level, f"recall at loss >= {share:.0%}", _mean(positive["flagged"]), positive.height, least=recall),
            Goal(level, "false flags on nulls", _mean(null["flagged"]), null.height, most=false),
        ]  # fmt: skip
        found += {"A": _of_a, "B": _of_b, "C": _of_c}[level](positive)
    return found + list(_shown(rows))


def _of_a(positive: pl.DataFrame) -> list[Goal]:
    return [
        Goal("A", "seconds lost: median error", _median(positive["error"]), positive.height, most=0.01),
        Goal("A", "interval holds the truth", _mean(positive["covered"]), positive.height),
    ]  # fmt: skip


def _of_b(positive: pl.DataFrame) -> list[Goal]:
    found = []
    for word, dirty, error, events in (("clean", False, 0.015, 0.97), ("dirty", True, 0.06, 0.90)):
        part = positive.filter(pl.col("dirty") == dirty)
        called = part.filter(pl.col("events_called").is_not_null())
        right, all_called = called["events_right"].sum(), called["events_called"].sum()
        hit, true = called["events_found"].sum(), called["events_true"].sum()
        found += [
            Goal("B", f"seconds lost: median error, {word}", _median(part["error"]), part.height, most=error),
            Goal("B", f"stalls called: precision, {word}", right / all_called if all_called else None, int(all_called), least=events),
            Goal("B", f"stalls called: recall, {word}", hit / true if true else None, int(true), least=events),
        ]  # fmt: skip
    return [
        *found,
        Goal("B", "loss on the right culprit, mean", _mean(positive["culprit_mass"].drop_nulls()), positive["culprit_mass"].count(), least=0.95),
        Goal("B", "interval holds the truth", _mean(positive["covered"]), positive.height, least=0.95),
    ]  # fmt: skip


def _of_c(positive: pl.DataFrame) -> list[Goal]:
    told = positive.filter(pl.col("lost_s").is_not_null())
    return [
        Goal("C", "interval holds the truth", _mean(told["covered"]), told.height, least=0.95),
        Goal("C", "seconds lost: median error", _median(told["error"]), told.height),
    ]


def _shown(rows: pl.DataFrame) -> list[Goal]:
    """Figures without a goal: harder than what the goals are about."""
    found = []
    logged = rows.filter(
        (pl.col("level") == "A log lines")
        & (pl.col("kind") == "positive")
        & (pl.col("share") >= MATERIAL)
    )
    found.append(Goal("A", "from log lines: median error", _median(logged["error"]), logged.height))
    for level in "ABC":
        mine = rows.filter(pl.col("level") == level)
        locked = mine.filter(pl.col("kind") == "adversarial")
        found.append(
            Goal(
                level, "flags on pauses locked to prefills", _mean(locked["flagged"]), locked.height
            )
        )
        wrong = mine.filter(
            pl.col("scenario").str.starts_with("misspecified") & (pl.col("share") >= MATERIAL)
        )
        found += [
            Goal(level, "mis-specified: recall", _mean(wrong["flagged"]), wrong.height),
            Goal(level, "mis-specified: median error", _median(wrong["error"]), wrong.height),
        ]
        null = mine.filter(pl.col("scenario") == "misspecified_null")
        found.append(Goal(level, "mis-specified: false flags", _mean(null["flagged"]), null.height))
    for scenario, word in (
        ("late_prefills", "prefills shown 5 ms late"),
        ("early_prefills", "prefills shown 5 ms early"),
        ("preemption", "a fifth of the prompts computed again"),
    ):
        mine = rows.filter((pl.col("level") == "B") & (pl.col("scenario") == scenario))
        found.append(Goal("B", f"{word}: median error", _median(mine["error"]), mine.height))
    return found


def _mean(values: pl.Series) -> float | None:
    return None if values.is_empty() else float(values.cast(pl.Float64).mean())  # type: ignore[arg-type]


def _median(values: pl.Series) -> float | None:
    known = values.drop_nulls()
    return None if known.is_empty() else float(known.median())  # type: ignore[arg-type]


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _by_scenario(rows: pl.DataFrame) -> list[list[str]]:
    """One line per level and scenario."""
    cells: list[list[str]] = [
        ["level", "scenario", "n", "loss share", "flagged", "cannot tell", "bias", "error p50", "error p90", "covered"]
    ]  # fmt: skip
    for (level, scenario), part in rows.group_by("level", "scenario", maintain_order=True):
        known = part.filter(pl.col("true_s") > 0)
        cells.append(
            [
                str(level), str(scenario), str(part.height), percent(_median(part["share"])),
                str(part["flagged"].sum()), str(part["silent"].sum()),
                percent(_median(known["bias"])), percent(_median(known["error"])),
                percent(known["error"].drop_nulls().quantile(0.9)), percent(_mean(known["covered"].drop_nulls())),
            ]
        )  # fmt: skip
    return cells[:1] + sorted(cells[1:], key=lambda row: row[0])


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 when a goal is missed and --check was given."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.accuracy", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--scenarios", nargs="*", help="only these; goals are about all")
    parser.add_argument("--each", action="store_true", help="also a line per scenario")
    parser.add_argument("--keep", metavar="FILE", help="all rows as Parquet")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    names = given.scenarios or [
        name for name, s in SCENARIOS.items() if s.kind != "other" or name.startswith(OTHERS)
    ]
    began = time.perf_counter()
    rows = measured(given.seeds, names, given.jobs)
    if given.keep:
        rows.write_parquet(given.keep)
    if given.each:
        table("scenario by scenario", _by_scenario(rows))
    found = goals(rows)
    title = f"{given.seeds} seeds x {len(names)} scenarios, {time.perf_counter() - began:.0f} s"
    header = ["level", "what", "measured", "goal", "cases", ""]
    table(title, [header, *(goal.row() for goal in found)])
    return int(given.check and any(goal.missed for goal in found))


if __name__ == "__main__":
    raise SystemExit(main())
