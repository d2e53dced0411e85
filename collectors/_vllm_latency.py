"""gen_ai.latency.* of vLLM: what each release computes, what can be trusted, and as nanoseconds.

Source: vllm-project/vllm, vllm/engine/llm_engine.py (V0), vllm/v1/engine/output_processor.py
`do_tracing` and vllm/v1/metrics/stats.py (V1). Values are seconds.
"""

from __future__ import annotations

import polars as pl

PREFIX = "gen_ai.latency."

V1_ONLY = ("time_in_model_prefill", "time_in_model_decode", "time_in_model_inference")
V0_ONLY = ("time_in_scheduler", "time_in_model_forward", "time_in_model_execute")

# quantity -> definition per era; the same name means different things in V0 and V1.
_SHARED = {
    "e2e": "arrival (time.time() in the API server) to the finish as seen there",
    "time_to_first_token": "arrival to the first output batch seen in the API server, IPC included",
}
_DEFINITIONS: dict[str, dict[str, str]] = {
    "V0": {
        "e2e": "vLLM V0: finished - arrival, wall clock",
        "time_to_first_token": "vLLM V0: first token - arrival, wall clock",
        "time_in_queue": "vLLM V0: first scheduled - arrival, wall clock; front end inside",
        "time_in_scheduler": "vLLM V0: time in the scheduler over the steps of the request",
        "time_in_model_forward": "vLLM V0: forward time of all steps that the request sat in",
        "time_in_model_execute": "vLLM V0: execute time of all steps that the request sat in",
    },
    "V1": {
        **{name: f"vLLM V1: {text}" for name, text in _SHARED.items()},
        "time_in_queue": "vLLM V1: first scheduled - queued, monotonic clock of the engine; "
        "on a KV consumer with asynchronous load the KV transfer is inside",
        "time_in_model_prefill": "vLLM V1: first token - first scheduled, monotonic clock",
        "time_in_model_decode": "vLLM V1: last token - first token, monotonic clock; "
        "stalls and preemptions inside",
        "time_in_model_inference": "vLLM V1: last token - first scheduled, monotonic clock",
    },
}
_UNKNOWN = "vLLM, engine generation unknown: as named"
QUANTITIES = tuple(dict.fromkeys([*_DEFINITIONS["V1"], *_DEFINITIONS["V0"]]))

# What is laid out in time must fit the request; sums of V0's step times are only reported.
_CHECKED = ("e2e", "time_to_first_token", "time_in_queue", *V1_ONLY)
# Frontend and engine stamp with different clocks; unset stamps miss by the uptime of the host.
SLACK_NS = 100_000_000

_IMPLAUSIBLE = "implausible_latency"
_NOT_USED = (
    ": negative or longer than the request, not used (a stamp was never set, or the clock stepped)"
)
_NEGATIVE = "time to first token - queue - prefill, below zero: laid out from the first token"
# Few texts stand in all rows: 1 byte each, and an Arrow dictionary for who reads them.
_NAMES = pl.Enum([*QUANTITIES, _IMPLAUSIBLE, "negative_remainder_ms"])
_UNITS = pl.Enum(["s", "ms"])
_SAID = [text for said in _DEFINITIONS.values() for text in said.values()]
_TEXTS = pl.Enum(
    [*dict.fromkeys(_SAID), *(f"{n}{_NOT_USED}" for n in _CHECKED), _UNKNOWN, _NEGATIVE]
)


def column(quantity: str) -> pl.Expr:
    """The attribute's column."""
    return pl.col(PREFIX + quantity)


def era() -> pl.Expr:
    """V1, V0 or NULL by the set of attributes: their time_in_queue differ."""
    v1 = pl.any_horizontal(column(name).is_not_null() for name in V1_ONLY)
    v0 = pl.any_horizontal(
        *(column(name).is_not_null() for name in V0_ONLY),
        pl.col("gen_ai.usage.num_sequences").is_not_null(),
        pl.col("gen_ai.response.model").is_not_null(),
    )
    return pl.when(v1).then(pl.lit("V1")).when(v0).then(pl.lit("V0"))


def with_durations(requests: pl.DataFrame) -> pl.DataFrame:
    """Adds `era`, and `<quantity>_ns`, `<quantity>_bad` of the quantities laid out in time.

    Stamps that were never set are 0.0 and subtracted blindly (issue 49135): a value is bad when it
    is negative or longer than the request; bad values are NULL in `<quantity>_ns`.
    """
    raw = requests.with_columns(
        era().alias("era"),
        *(
            (column(name) * 1e9).round().cast(pl.Int64, strict=False).alias(f"{name}_ns")
            for name in _CHECKED
        ),
    )
    span_ns = pl.col("end_ns") - pl.col("start_ns")
    bad_e2e = (pl.col("e2e_ns") < 0) | (pl.col("e2e_ns") > span_ns + SLACK_NS).fill_null(
        value=False
    )
    raw = raw.with_columns(bad_e2e.fill_null(value=False).alias("e2e_bad"))
    raw = raw.with_columns(
        pl.when(~pl.col("e2e_bad")).then(pl.col("e2e_ns")).alias("e2e_ns"),
    ).with_columns(
        # The attribute is better than the span's end, which is when somebody called span.end().
        pl.coalesce("e2e_ns", pl.when(span_ns >= 0).then(span_ns)).alias("window_ns"),
    )
    inner = [name for name in _CHECKED if name != "e2e"]
    raw = raw.with_columns(
        (
            (pl.col(f"{name}_ns") < 0)
            | (pl.col(f"{name}_ns") > pl.col("window_ns") + SLACK_NS).fill_null(value=False)
        )
        .fill_null(value=False)
        .alias(f"{name}_bad")
        for name in inner
    )
    return raw.with_columns(
        pl.when(~pl.col(f"{name}_bad")).then(pl.col(f"{name}_ns")).alias(f"{name}_ns")
        for name in inner
    )


def any_bad() -> pl.Expr:
    """Whether a value of the request was set aside."""
    return pl.any_horizontal(pl.col(f"{name}_bad") for name in _CHECKED)


def _rows(
    requests: pl.DataFrame, quantity: str, value: pl.Expr, unit: str, definition: str
) -> pl.DataFrame:
    return requests.select(
        "source",
        "leg",
        pl.lit(quantity, dtype=_NAMES).alias("quantity"),
        value.cast(pl.Float64).alias("value"),
        pl.lit(unit, dtype=_UNITS).alias("unit"),
        pl.lit(definition, dtype=_TEXTS).alias("definition"),
    )


def reported(requests: pl.DataFrame) -> pl.DataFrame:
    """Every latency as the engine states it, defined as in its release, and what was set aside."""
    frames: list[pl.DataFrame] = []
    generations = requests["era"].unique().to_list()
    for generation in generations:
        part = requests.select("source", "leg", "era", *map(column, QUANTITIES))
        if len(generations) > 1:
            part = part.filter(pl.col("era").eq_missing(pl.lit(generation, dtype=pl.String)))
        definitions = _DEFINITIONS.get(str(generation), {})
        for name in QUANTITIES:
            found = _rows(part, name, column(name), "s", definitions.get(name, _UNKNOWN))
            frames.append(found.filter(pl.col("value").is_not_null()))
    narrow = requests.select(
        "source", "leg", "remainder_ns",
        *(column(name) for name in _CHECKED), *(f"{name}_bad" for name in _CHECKED),
    )  # fmt: skip
    for name in _CHECKED:
        part = narrow.filter(pl.col(f"{name}_bad"))
        frames.append(_rows(part, _IMPLAUSIBLE, column(name), "s", f"{name}{_NOT_USED}"))
    negative, value = narrow.filter(pl.col("remainder_ns") < 0), pl.col("remainder_ns") / 1e6
    frames.append(_rows(negative, "negative_remainder_ms", value, "ms", _NEGATIVE))
    return pl.concat(frames)
