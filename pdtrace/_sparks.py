"""Charts in a line of text: how a figure went over time, what parts a whole has. They need no colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pdtrace import numbers
from pdtrace.model import PHASES

LEVELS = "▁▂▃▄▅▆▇█"
WIDE, CELLS, FEW_CELLS = 72, 40, 20  # stretches on a wide and on a narrow terminal
MOVES = 1.5  # greatest over least: a figure that moves less is not drawn
_NAME = 9
_LETTERS = dict(zip(PHASES, "nfrqlpwtedsx·", strict=True))
_ROWS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("load", "arrival_rate", lambda v: f"{v:.3g}/s"),
    ("TTFT p50", "ttft_p50_ms", numbers.duration),
    ("TPOT p50", "tpot_p50_ms", numbers.duration),
    ("failed", "failed", numbers.count),
)


def spark(values: Sequence[float | None]) -> str:
    """Values as bars from 0 to the greatest; nothing where one is unknown."""
    top = max((v for v in values if v is not None), default=0)
    steps = len(LEVELS) - 1
    return "".join(
        " " if v is None else LEVELS[round(steps * max(v, 0) / top) if top > 0 else 0] for v in values
    )  # fmt: skip


def time_lines(rows: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """One line a figure that moves, with its least and greatest; two where the width asks for it."""
    parts = round((rows[-1]["end_ns"] - rows[0]["start_ns"]) / (rows[0]["end_ns"] - rows[0]["start_ns"]))  # fmt: skip
    by_place = {row["bin"]: row for row in rows}
    places = [by_place.get(n) for n in range(max(parts, max(by_place) + 1))]
    lines: list[str] = []
    for name, column, write in _ROWS:
        # Nobody came: no load, no failure, and no latency that could be known.
        empty = 0.0 if column in {"arrival_rate", "failed"} else None
        values = [empty if row is None else row[column] for row in places]
        lines += _line(name, values, write, width)
    if lines:
        lines.append(_axis(rows, len(places)))
    return lines


def _line(
    name: str, values: Sequence[float | None], write: Callable[[float | None], str], width: int
) -> Iterator[str]:
    known = [v for v in values if v is not None]
    if len(known) < 2 or max(known) <= MOVES * min(known):
        return
    text = f"{name:<{_NAME}}{spark(values)}"
    span = f"{write(min(known))} – {write(max(known))}"
    if len(text) + 2 + len(span) <= width:
        yield f"{text.ljust(_NAME + len(values))}  {span}"
    else:
        yield text.rstrip()
        yield " " * _NAME + span


def _axis(rows: Sequence[Mapping[str, Any]], parts: int) -> str:
    each = numbers.duration((rows[0]["end_ns"] - rows[0]["start_ns"]) / 1e6)
    return f"{parts} stretches of {each}, bars from 0; requests by their start"


def stacked(phases: Sequence[Mapping[str, Any]], cells: int) -> list[str]:
    """The phases of the time to first token as one bar, a letter a phase; then what the letters mean."""
    shares: dict[str, float] = {}
    for row in phases:
        if row["share_of_ttft"]:
            shares[row["phase"]] = shares.get(row["phase"], 0.0) + row["share_of_ttft"]
    ordered = [(phase, shares[phase]) for phase in PHASES if shares.get(phase, 0.0) > 0]
    if len(ordered) < 2:
        return []
    bar, done, told = "", 0.0, []
    for phase, share in ordered:
        done += share
        length = round(min(done, 1.0) * cells) - len(bar)
        bar += _LETTERS[phase] * max(length, 0)
        told.append(f"{_LETTERS[phase]} {phase} {numbers.share(share)}")
    return [bar, ", ".join(told)]
