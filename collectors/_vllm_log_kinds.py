"""Sorting vLLM log lines by what they tell, whole columns at a time."""

from __future__ import annotations

import polars as pl

from . import _vllm_log_config as config
from . import _vllm_log_events as alarms
from . import _vllm_log_lmcache as lmcache
from . import _vllm_log_periodic as periodic
from . import _vllm_log_requests as requests
from ._vllm_log_frame import is_step

ACCESS = r'"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+" (?P<status>\d{3})'
_ORDER = ("request", "lmcache", "step", "periodic", "alarm", "config", "access")
_STATED = r"^(?:Received|Generated|Request|Added|Aborted|Finished|start_load_kv) "


def between() -> list[pl.Expr]:
    """Where lines without a stamp lie: the stamp before them, and how far the next one is."""
    own_end = pl.col("time_ns") + pl.col("resolution_ns")
    before = pl.col("time_ns").forward_fill().over("stream")
    after = own_end.backward_fill().over("stream")
    return [before.alias("after_ns"), (after - before).clip(lower_bound=0).alias("gap_ns")]


def with_kind(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with `kind`: step, periodic, request, lmcache, config, alarm, access, prompt or other.

    Lines that begin as request lines are those, whatever their prompt says.
    """
    step = is_step(frame["text"])
    # steps may be nearly all lines of a log: the other kinds are looked for in the rest only
    text = pl.when(~step).then("text")
    found = frame.select(
        text.str.contains_any(list(periodic.MARKERS)).alias("periodic"),
        text.str.contains_any(list(requests.MARKERS)).alias("request"),
        text.str.contains("HTTP/", literal=True).alias("access"),
        text.str.contains_any(list(config.MARKERS)).alias("config"),
        text.str.contains_any(list(alarms.MARKERS)).alias("alarm"),
        lmcache.is_line(text).alias("lmcache"),
    ).with_columns(step.alias("step"))
    asked = found["request"].any()
    if asked:
        stated = frame["message"].str.contains(_STATED)
        found = found.with_columns((pl.col("request") & stated).alias("request"))
    if found["access"].any():
        found = found.with_columns(
            (pl.col("access") & frame["text"].str.contains(ACCESS)).alias("access")
        )
    kinds = [pl.when(name).then(pl.lit(name)) for name in _ORDER]
    frame = frame.with_columns(
        found.select(pl.coalesce(*kinds, pl.lit("other")).alias("kind"))["kind"]
    )
    return _swallow(frame) if asked else frame


def _swallow(frame: pl.DataFrame) -> pl.DataFrame:
    """Lines of a prompt that spans lines become kind `prompt`, whatever they look like.

    vLLM repeats its prefix on each line of a message, so they have the place (file:line) of the
    line that opened the prompt; anything from another place ends it. The line that closes it
    carries the parameters.
    """
    text = pl.col("text")
    opens = text.str.contains(requests.OPENS_PROMPT) & ~text.str.contains(requests.ENDS_PROMPT)
    frame = frame.with_columns(opens.alias("opens"))
    if not frame["opens"].any():
        return frame.drop("opens")
    place = pl.when("opens").then(pl.col("place").fill_null("")).forward_fill().over("stream")
    here = pl.col("place").is_null() | (pl.col("place") == place)
    state = (
        pl.when("opens")
        .then(True)
        .when(~here | text.str.contains(requests.ENDS_PROMPT))
        .then(False)
        .forward_fill()
        .over("stream")
        .fill_null(False)
    )
    inside = (
        state.shift(1, fill_value=False).over("stream")
        & here
        & ~pl.col("opens")
        & place.is_not_null()
    )
    opener = pl.coalesce(*[text.str.extract(requests.OPENS_PROMPT, group) for group in (1, 2)])
    rewritten = pl.format(
        "Parameters of {}: {}",
        pl.when("opens").then(opener).forward_fill().over("stream"),
        "message",
    )
    frame = frame.with_columns(inside.alias("inside"), rewritten.alias("rewritten"))
    closes = pl.col("inside") & text.str.contains("params: SamplingParams(", literal=True)
    return frame.with_columns(
        pl.when(closes)
        .then(pl.lit("request"))
        .when("inside")
        .then(pl.lit("prompt"))
        .otherwise("kind")
        .alias("kind"),
        pl.when(closes).then("rewritten").otherwise("message").alias("message"),
    ).drop("opens", "inside", "rewritten")
