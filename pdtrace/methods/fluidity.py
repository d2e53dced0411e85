"""Fluidity: whether tokens come in time for a reader, with the slack that early tokens leave.

Source: Agrawal et al., "Etalon: Holistic Performance Evaluation Framework for LLM Inference
Systems" (arXiv 2407.07000). The first token has a deadline of its own, each later one a deadline
after the token before it; a token that is early leaves its time to the next ones (slack), a late
one starts the slack anew. Two indices go by that name and both are given:

fluidity_doc    tokens on time / tokens, as the paper defines it
fluidity_code   1 - missed / (met + missed deadlines), as its published code counts: a stall of ten
                deadlines is ten misses

With slack s and x = deadline - gap the slack follows Lindley's recursion s = max(0, s + x)
(Lindley 1952), so that all streams are computed at once from running sums and running minima.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pdtrace.methods.statistics import Floats

Ints = NDArray[np.int64]
SCHEMA: dict[str, type[pl.DataType]] = {
    "request": pl.String, "emissions": pl.Int64, "on_time": pl.Int64,
    "missed_deadlines": pl.Int64, "fluidity_doc": pl.Float64, "fluidity_code": pl.Float64,
}  # fmt: skip


def fluidity(streams: pl.DataFrame) -> pl.DataFrame:
    """One row per request of `streams`: request, ttft_us, first_deadline_us, deadline_us, gaps_us, emission_tokens.

    An emission of several tokens is as many tokens at once; where their number is unknown, it is
    one. Several streams of a request are judged each by itself and counted together.
    """
    if not streams.height:
        return pl.DataFrame(schema=SCHEMA)
    gaps = streams["gaps_us"].list.len().cast(pl.Int64).to_numpy()
    tokens = _tokens(streams, gaps)
    on_time, missed = counted(
        streams["first_deadline_us"].to_numpy() - streams["ttft_us"].to_numpy(),
        streams["deadline_us"].to_numpy().astype(np.int64),
        streams["gaps_us"].explode().to_numpy().astype(np.int64),
        gaps,
        tokens,
    )
    ends = np.cumsum(gaps + 1)
    total = np.add.reduceat(tokens, np.concatenate([[0], ends[:-1]]))
    summed = (
        pl.DataFrame({"request": streams["request"], "emissions": total, "on_time": on_time, "missed_deadlines": missed})
        .group_by("request", maintain_order=True)
        .sum()
    )  # fmt: skip
    return summed.with_columns(
        fluidity_doc=pl.col("on_time") / pl.col("emissions"),
        fluidity_code=1 - pl.col("missed_deadlines") / (pl.col("on_time") + pl.col("missed_deadlines")),
    ).select(list(SCHEMA))  # fmt: skip


def _tokens(streams: pl.DataFrame, gaps: Ints) -> Ints:
    """Tokens of each emission, stream after stream; 1 where the stream does not say it of every emission."""
    known = (streams["emission_tokens"].list.len() == gaps + 1).fill_null(value=False)
    ones = pl.Series(gaps + 1).cast(pl.Int64)
    said = pl.select(
        pl.when(known)
        .then(streams["emission_tokens"].cast(pl.List(pl.Int64)))
        .otherwise(pl.lit(1, pl.Int64).repeat_by(ones))
    ).to_series()
    tokens: Ints = np.maximum(said.explode().fill_null(1).to_numpy().astype(np.int64), 1)
    return tokens


def counted(
    first_slack: Ints | Floats, deadline: Ints, gaps: Ints, lengths: Ints, tokens: Ints
) -> tuple[Ints, Ints]:
    """Tokens on time and deadlines missed by stream.

    `first_slack` is first deadline - time to first token by stream, `gaps` all gaps stream after
    stream, `lengths` gaps by stream, `tokens` tokens of each emission (one more a stream than gaps).
    """
    n = lengths + 1
    stream = np.repeat(np.arange(len(n)), n)
    starts = np.cumsum(n) - n
    first = np.zeros(len(stream), dtype=bool)
    first[starts] = True
    x = np.empty(len(stream), dtype=np.int64)
    x[first] = np.floor(first_slack)
    # The tokens that came with the emission before leave their deadlines as slack.
    x[~first] = deadline[stream[~first]] * np.roll(tokens, 1)[~first] - gaps
    total = np.cumsum(x)
    total -= np.repeat(total[starts] - x[starts], n)
    lowest = _lowest_before(total, stream, starts, n)
    short = lowest - total  # > 0: so much too late, with all slack used
    late = short > 0
    missed = np.where(late, 1 + short // deadline[stream], 0)
    tokens_on_time = np.add.reduceat(tokens, starts) - np.add.reduceat(
        late.astype(np.int64), starts
    )
    return tokens_on_time, np.add.reduceat(missed, starts)


def _lowest_before(total: Ints, stream: Ints, starts: Ints, n: Ints) -> Ints:
    """The smallest running sum of the stream before each emission, 0 before its first."""
    before = np.roll(total, 1)
    before[starts] = 0
    # One running minimum over all streams: each begins below everything before it.
    step = int(before.max() - before.min()) + 1
    offset = stream * step
    lowest: Ints = np.minimum.accumulate(before - offset) + offset
    return lowest
