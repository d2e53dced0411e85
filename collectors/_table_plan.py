"""The reading plan of one request table: which column gives what, in which unit."""

from __future__ import annotations

import re
from dataclasses import field

import polars as pl

from pdtrace.model import Sink
from pdtrace.records import dataclass

from ._table_headers import (
    DURATIONS,
    INSTANTS,
    Column,
    may_repeat,
    understand_all,
)
from ._table_names import NAMING, holds_text
from ._table_units import NAMES, Guess, guess_units
from ._table_values import (
    InstantRule,
    cell_units,
    comma_is_decimal,
    durations_ms,
    instant_rule,
    instants_ns,
    numbers,
    text,
)

NAMED_COLUMNS = 30  # of columns that were not used, so many are named
NOTE_CHARACTERS = 200
_FAR = 10  # a start that is so many times the duration from zero counts on a clock
_LONGEST_RUN_NS = 31 * 86_400 * 1_000_000_000


# Meanings that need no look at values: a column empty at first may tell of failures later.
_WORDS = {
    "note", "external_id", "traceparent", "trace_id", "span_id", "parent_span_id", "remote_id",
    "session", "http_status", "status", "aborted", "error", "finish_reason", "model", "worker",
    "rank", "request_id",
}  # fmt: skip


@dataclass
class Plan:
    """Columns by meaning, with units and instant rules."""

    columns: dict[str, list[Column]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)  # by column name
    guesses: dict[str, Guess] = field(default_factory=dict)  # by column name
    commas: dict[str, bool] = field(default_factory=dict)  # by column name
    rules: dict[str, InstantRule] = field(default_factory=dict)  # by column name
    unused: list[str] = field(default_factory=list)
    dialect: str = ""  # litellm, burstgpt, llmperf
    zero_output_fails: bool = False
    block_tokens: int | None = None  # of the prompt blocks whose hashes the table lists

    def first(self, meaning: str) -> Column | None:
        """The column that gives this."""
        found = self.columns.get(meaning)
        return found[0] if found else None

    def wall(self) -> bool | None:
        """Whether the instants are times of day; None where there are none."""
        return next((rule.wall for rule in self.rules.values()), None)


def make_plan(frame: pl.DataFrame, *, semicolons: bool = False) -> Plan:
    """Decide on the first rows what the table's columns are; `semicolons` separate its cells."""
    plan = Plan(dialect=_dialect(frame.columns))
    plan.commas = _commas(frame, semicolons)
    for column in understand_all(frame.columns):
        series = frame[column.name]
        if series.null_count() == len(series) and column.meaning not in _WORDS:
            continue
        meaning = _settle(column, series, plan)
        if meaning is None or (plan.columns.get(meaning) and not may_repeat(meaning)):
            continue
        plan.columns.setdefault(meaning, []).append(
            Column(column.name, meaning, column.unit, column.rank)
        )
    _on_the_clock_of_the_start(plan, frame)
    _settle_units(plan, frame)
    used = {c.name for columns in plan.columns.values() for c in columns}
    empty = {
        n
        for n in frame.columns
        if frame[n].null_count() == frame.height and frame[n].dtype != pl.Null
    }
    plan.unused = [n for n in frame.columns if n not in used and n not in empty]
    plan.zero_output_fails = plan.dialect == "burstgpt"
    return plan


def extend_plan(plan: Plan, frame: pl.DataFrame) -> None:
    """Take in columns that appear only in a later batch of JSON records."""
    known = {c.name for columns in plan.columns.values() for c in columns} | set(plan.unused)
    for column in understand_all([name for name in frame.columns if name not in known]):
        taken = plan.columns.get(column.meaning) and not may_repeat(column.meaning)
        wrong = column.meaning in NAMING and holds_text(frame[column.name], column.name)
        if column.meaning in _WORDS and not taken and not wrong:
            plan.columns.setdefault(column.meaning, []).append(column)


def _dialect(names: list[str]) -> str:
    lower = {n.strip().lower() for n in names}
    if {"completionstarttime", "starttime", "endtime"} <= lower:
        return "litellm"
    if {"request tokens", "response tokens", "log type"} <= lower:
        return "burstgpt"
    if {"ttft_s", "end_to_end_latency_s", "inter_token_latency_s"} <= lower:
        return "llmperf"
    return "mooncake" if "hash_ids" in lower and "input_length" in lower else ""


def _commas(frame: pl.DataFrame, semicolons: bool) -> dict[str, bool]:
    """Decimal commas column by column; a column that does not tell follows the others.

    Spreadsheets separate cells by semicolons where the comma is the decimal sign.
    """
    found = {name: comma_is_decimal(frame[name].head(2000)) for name in frame.columns}
    default = any(value is True for value in found.values()) or (
        semicolons and not any(value is False for value in found.values())
    )
    return {name: default if value is None else value for name, value in found.items()}


def _settle(column: Column, series: pl.Series, plan: Plan) -> str | None:
    """The meaning after a look at the values: instant or duration, list or number, or none."""
    meaning = column.meaning
    if meaning in NAMING and holds_text(series, column.name):
        return None
    is_list = isinstance(series.dtype, pl.List)
    if meaning in ("chunk_times", "itl") or is_list:
        if is_list:
            return _settle_list(column, series, plan)
        if meaning == "chunk_times":
            return None
        return _settle(Column(column.name, "tpot", column.unit, column.rank), series, plan)
    if meaning in INSTANTS or meaning in ("ttft", "e2e"):
        return _settle_time(column, series, plan)
    if meaning in DURATIONS or meaning in (
        "prompt_tokens",
        "output_tokens",
        "cached_tokens",
        "total_tokens",
        "max_tokens",
        "tps",
        "turn",
        "cache_hit_ratio",
    ):
        return meaning if _mostly_numbers(series, plan.commas.get(column.name)) else None
    return meaning


def _mostly_numbers(series: pl.Series, comma: bool | None) -> bool:
    value, _ = numbers(series, decimal_comma=comma)
    filled = text(series) if series.dtype == pl.String else series
    present = len(filled) - filled.null_count()
    return present > 0 and (len(value) - value.null_count()) * 2 > present


def _settle_time(column: Column, series: pl.Series, plan: Plan) -> str | None:
    rule = instant_rule(series, column.unit)
    if rule is None:
        return None
    named_instant = column.meaning in INSTANTS
    if not named_instant and rule.kind == "epoch" and _too_far_apart(series, rule):
        return column.meaning  # a duration's nanoseconds are as many as an epoch's seconds
    if rule.wall or (named_instant and column.meaning != "end"):
        if not rule.wall and plan.dialect == "mooncake":
            rule = InstantRule("relative", "ms", resolution_ns=1_000_000)
        if (
            not rule.wall
            and column.meaning == "start"
            and column.name.strip().lower() in ("time", "t", "time_s")
        ):
            return "e2e" if not plan.first("e2e") else None  # a plain "time" that is no time of day
        plan.rules[column.name] = rule
        return {"ttft": "first_at", "e2e": "end"}.get(column.meaning, column.meaning)
    if named_instant:  # an end in the clock of a start, or nothing
        plan.rules[column.name] = rule
        return column.meaning
    return column.meaning


_AN_INSTANT = re.compile(
    r"(?:first|last)_?token_?(?:time|at|ts)|(?:end|finish|complet|done)\w*_?(?:time|at|ts)|timestamp"
)


def _on_the_clock_of_the_start(plan: Plan, frame: pl.DataFrame) -> None:
    """A first or last token's "time" that follows an undated start row by row is an instant, no duration.

    So TensorRT-LLM gives them: arrival, first and last token on a clock that counts from the machine's start.
    """
    start = plan.first("start")
    rule = plan.rules.get(start.name) if start else None
    if start is None or rule is None or rule.wall:
        return
    began = numbers(frame[start.name], decimal_comma=plan.commas.get(start.name))[0]
    for meaning, instant in (("ttft", "first_at"), ("e2e", "end")):
        column = plan.first(meaning)
        if column is None or column.unit != start.unit or plan.first(instant):
            continue
        if "to_" in column.name.lower() or not _AN_INSTANT.search(column.name.lower()):
            continue
        value = numbers(frame[column.name], decimal_comma=plan.commas.get(column.name))[0]
        apart, latest = (value - began).drop_nulls(), began.max()
        after, usual = apart.min(), apart.median()
        if not isinstance(after, int | float) or not isinstance(usual, int | float):
            continue
        if after >= 0 and isinstance(latest, int | float) and latest >= _FAR * usual:
            plan.columns[meaning].remove(column)
            plan.columns[instant] = [Column(column.name, instant, column.unit, column.rank)]
            plan.rules[column.name] = rule


def _too_far_apart(series: pl.Series, rule: InstantRule) -> bool:
    """Instants of one run lie within a month of each other."""
    at = instants_ns(series, rule).drop_nulls()
    first, last = at.min(), at.max()
    return isinstance(first, int) and isinstance(last, int) and last - first > _LONGEST_RUN_NS


def _settle_list(column: Column, series: pl.Series, plan: Plan) -> str | None:
    values = series.explode().drop_nulls()
    if not len(values) or not values.dtype.is_numeric():
        return None
    rule = instant_rule(values.head(10_000), column.unit)
    if column.meaning == "itl" or (
        rule is not None and not rule.wall and column.meaning != "chunk_times"
    ):
        return "gaps"
    if rule is None:
        return None
    plan.rules[column.name] = rule
    return "chunk_times"


def _settle_units(plan: Plan, frame: pl.DataFrame) -> None:
    raw: dict[str, pl.Series] = {}
    known: dict[str, str] = {}
    for meaning in (*DURATIONS, "gaps"):
        column = plan.first(meaning)
        if column is None:
            continue
        series = frame[column.name]
        if isinstance(series.dtype, pl.List):
            series = series.list.mean()
        unit = column.unit or cell_units(series)
        if unit and unit not in ("min",):
            plan.units[column.name] = unit
            if meaning in ("ttft", "e2e", "tpot"):
                known[meaning] = unit
        if meaning in ("ttft", "e2e", "tpot"):
            raw[meaning] = numbers(series, decimal_comma=plan.commas.get(column.name))[0]
    span = _span_ms(plan, frame)
    tokens, rate = (_number_column(plan, frame, m) for m in ("output_tokens", "tps"))
    for meaning, guess in guess_units(raw, known, span, tokens, rate).items():
        column = plan.first(meaning)
        assert column is not None
        plan.units[column.name], plan.guesses[column.name] = guess.unit, guess
    _follow(plan)


def _follow(plan: Plan) -> None:
    """Columns without any hint take the unit of their neighbours."""
    neighbour = next(
        (plan.units[c.name] for m in ("e2e", "ttft", "tpot") if (c := plan.first(m))), "ms"
    )
    for meaning in (*DURATIONS, "gaps"):
        column = plan.first(meaning)
        if column is not None and column.name not in plan.units:
            plan.units[column.name] = neighbour
            plan.guesses[column.name] = Guess(neighbour, "the other durations of the table are")


def _number_column(plan: Plan, frame: pl.DataFrame, meaning: str) -> pl.Series | None:
    column = plan.first(meaning)
    if column is None:
        return None
    whole = meaning.endswith("_tokens")
    return numbers(frame[column.name], decimal_comma=plan.commas.get(column.name), whole=whole)[0]


def _span_ms(plan: Plan, frame: pl.DataFrame) -> pl.Series | None:
    start, end = plan.first("start"), plan.first("end")
    if start is None or end is None or start.name not in plan.rules or end.name not in plan.rules:
        return None
    a, b = (instants_ns(frame[c.name], plan.rules[c.name]) for c in (start, end))
    return (b - a) / 1e6


def column_ms(plan: Plan, frame: pl.DataFrame, meaning: str) -> pl.Series | None:
    """A duration column in ms."""
    column = plan.first(meaning)
    if column is None or column.name not in frame.columns:
        return None
    return durations_ms(
        frame[column.name], plan.units[column.name], decimal_comma=plan.commas.get(column.name)
    )


def tell(plan: Plan, out: Sink) -> None:
    """Say how the table was read: columns, guessed units, zone, what was not used."""
    read = [
        f"{meaning} = {column.name}"
        + (f" [{plan.units[column.name]}]" if column.name in plan.units else "")
        for meaning, columns in plan.columns.items()
        for column in columns
    ]
    out.fact(None, "columns_read", "; ".join(read))
    if plan.unused:
        more = (
            f" and {len(plan.unused) - NAMED_COLUMNS} more"
            if len(plan.unused) > NAMED_COLUMNS
            else ""
        )
        out.fact(
            None, "columns_not_used", ", ".join(n[:60] for n in plan.unused[:NAMED_COLUMNS]) + more
        )
    for name, guess in plan.guesses.items():
        out.fact(None, f"unit_guess:{name}", f"{NAMES[guess.unit]}, because {guess.why}")
    if any(rule.zone_missing for rule in plan.rules.values()):
        out.fact(None, "time_zone", "the instants name no zone; read as UTC")
    if not {"http_status", "status", "error", "aborted"} & set(plan.columns):
        out.fact(None, "status_basis", "no status column: a row with an answer counts as completed")
