"""GuideLLM: the single requests of a report (benchmarks.json), every benchmark of it a client of its own.

Source: vllm-project/guidellm, src/guidellm/schemas/info.py and request_stats.py (0.4 to 0.8), before
that src/guidellm/benchmark/benchmark.py (0.2, 0.3). Clock: time.time() of the client. Instants of the
first and the last token only: no gaps between tokens. A request that was stopped with the benchmark
(`incomplete`) counts as aborted. response_id (0.5 and later) is the server's own id of the answer.
time_per_output_token_ms of the file holds the first token in new versions and divides by all tokens
in old ones: not used. Prompts and answers stand in the file and are not stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from pdtrace.model import WALL, Head, Match, Sink, Source

from ._common import NOT_AN_OBJECT, integer, number, whole_document
from ._errors import UNNAMED, error_kind

TITLE = "GuideLLM report (benchmarks.json)"

TTFT = "client: first chunk with a token, reasoning counts - request sent"
TTFT_TEXT = "client: first chunk with text of the answer - request sent"
TTFOT = "first chunk with a token of the answer, after reasoning - request sent"
DELAY = "request sent - instant the load called for: the load generator's own delay"
NOT_LISTED = "counted in the report's totals, but not listed: the run kept a sample of its requests"
NO_START = "request that was never sent"
_MARKS = re.compile(
    rb'"guidellm_version"\s*:|"type_"\s*:\s*"(?:generative_benchmark|generative_request_stats|generative_text_response)"'
)
_STATUS = {"successful": "completed", "errored": "failed", "incomplete": "aborted"}
_ROW: dict[str, type[pl.DataType]] = {
    "leg": pl.String, "record": pl.Int64, "request_id": pl.String, "session": pl.String,
    "turn": pl.Int64, "status": pl.String, "error": pl.String, "start": pl.Float64,
    "first": pl.Float64, "last": pl.Float64, "end": pl.Float64, "due": pl.Float64,
    "answer": pl.Float64, "ttft_definition": pl.String, "prompt_tokens": pl.Int64, "cached_tokens": pl.Int64,
    "output_tokens": pl.Int64,
}  # fmt: skip


def sniff(head: Head) -> Match | None:
    """By words that only its reports have, in a JSON document."""
    if head.data.lstrip()[:1] == b"{" and _MARKS.search(head.data) and b'"benchmarks"' in head.data:
        return Match("exact", TITLE)
    return None


def read(source: Source, out: Sink) -> None:
    """Every request of every benchmark (one load each) as a client leg."""
    out.unit("request")
    document = whole_document(source, out)
    if document is None:
        return
    benchmarks = document.get("benchmarks") if isinstance(document, dict) else None
    if not isinstance(benchmarks, list) or not benchmarks:
        out.read(1)
        out.skip(0, "no benchmark" if isinstance(document, dict) else NOT_AN_OBJECT)
        return
    first = 0
    version = _inner(document, "metadata").get("guidellm_version")
    for place, benchmark in enumerate(benchmarks):
        if isinstance(benchmark, dict):
            first += _read_benchmark(source, benchmark, (place, version), first, out)


def _read_benchmark(
    source: Source, benchmark: dict[str, Any], which: tuple[int, Any], first: int, out: Sink
) -> int:
    """One load; it is a client of its own, so that two loads are never pooled. Returns its records."""
    place, version = which
    name = source.path if place == 0 else f"{source.path}#{place}"
    worker = out.worker({"file": name}, role="client", role_basis="log", name="GuideLLM", engine="guidellm")  # fmt: skip
    config = _inner(benchmark, "config") or _inner(benchmark, "args")
    for key, fact in _facts(config, version):
        out.fact(worker, key, fact)
    listed = list(_listed(_inner(benchmark, "requests")))
    # The report nests every request and knows two layouts: it is unfolded one request at a time.
    rows = [_row(f"{source.path}#{first + n}", first + n, *entry) for n, entry in enumerate(listed)]
    more = _not_listed(benchmark, len(listed))
    out.read(len(listed) + more)
    if more:
        out.skip_many(more, NOT_LISTED, first + len(listed))
    unsent = [row["record"] for row in rows if row["start"] is None]
    if unsent:
        out.skip(unsent, NO_START)
    rows = [row for row in rows if row["start"] is not None]
    if rows:
        frame = pl.DataFrame(rows, schema=_ROW)
        backend = _inner(config, "backend") or _inner(benchmark, "worker")
        model = _name(backend.get("model")) or _name(backend.get("backend_model"))
        out.add("legs", _legs(frame, worker, model))
        said = pl.concat(
            [_reported(frame, "due", "start", DELAY), _reported(frame, "start", "answer", TTFOT)]
        )
        if said.height:
            out.add("reported", said)
    return len(listed) + more


def _inner(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under a key; empty where there is none."""
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _facts(config: dict[str, Any], version: Any) -> Iterator[tuple[str, object]]:
    strategy = _inner(config, "strategy")
    kind = strategy.get("type_")
    if version:
        yield "client_version", version
    if kind:
        yield "load", kind
    if kind in ("constant", "poisson", "async") and number(strategy.get("rate")) is not None:
        yield "request_rate", strategy["rate"]
    streams = strategy.get("streams", strategy.get("max_concurrency"))
    if kind == "concurrent" and integer(streams) is not None:
        yield "max_concurrency", streams


def _listed(requests: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for group, status in _STATUS.items():
        found = requests.get(group)
        for request in found if isinstance(found, list) else ():
            if isinstance(request, dict):
                yield status, request


def _not_listed(benchmark: dict[str, Any], listed: int) -> int:
    """Requests that the totals count beyond those in the lists."""
    totals = _inner(_inner(benchmark, "metrics"), "request_totals") or _inner(benchmark, "request_totals")  # fmt: skip
    return max((integer(totals.get("total")) or 0) - listed, 0)


def _row(leg: str, record: int, status: str, request: dict[str, Any]) -> dict[str, Any]:
    info, times = _inner(request, "info"), _inner(_inner(request, "info"), "timings")
    if not times:  # 0.2 and 0.3
        times = {
            "request_start": request.get("start_time"), "request_end": request.get("end_time"),
            "first_token_iteration": request.get("first_token_time"),
            "last_token_iteration": request.get("last_token_time"),
            "targeted_start": _inner(request, "scheduler_info").get("targeted_start_time"),
        }  # fmt: skip
    asked = _inner(request, "input_metrics")
    return {
        "leg": leg, "record": record, "status": status,
        "request_id": _name(request.get("response_id")) or _name(request.get("request_id")),
        "session": _name(info.get("conversation_id")),
        "turn": integer(info.get("turn_index")) if _name(info.get("conversation_id")) else None,
        "error": (error_kind(info.get("error") or request.get("error")) or UNNAMED) if status == "failed" else None,
        "start": _instant(times.get("request_start")), "end": _instant(times.get("request_end")),
        "first": _instant(times.get("first_token_iteration")),
        "last": _instant(times.get("last_token_iteration")),
        "due": _instant(times.get("targeted_start")),
        "answer": _instant(times.get("first_output_token_iteration")),
        "ttft_definition": TTFT if "first_output_token_iteration" in times else TTFT_TEXT,
        "prompt_tokens": _tokens(asked) if asked else integer(request.get("prompt_tokens")),
        "cached_tokens": integer(asked.get("cached_tokens")),
        # without the server's count the file has one token for each chunk: no count of tokens
        "output_tokens": _tokens(_inner(request, "output_metrics")) if "output_metrics" in request else integer(request.get("output_tokens")),
    }  # fmt: skip


def _instant(value: Any) -> float | None:
    """Seconds since the epoch; -1 and 0 stand for none."""
    seconds = number(value)
    return seconds if seconds is not None and seconds > 0 else None


def _name(value: Any) -> str | None:
    """An id; None for what is none."""
    return str(value) if value and isinstance(value, str | int) and value is not True else None


def _tokens(metrics: dict[str, Any]) -> int | None:
    found = integer(metrics.get("total_tokens"))
    return integer(metrics.get("text_tokens")) if found is None else found


def _legs(rows: pl.DataFrame, worker: str, model: str | None) -> pl.DataFrame:
    names = {
        "start": "start_ns",
        "first": "first_token_ns",
        "last": "last_token_ns",
        "end": "end_ns",
    }
    return rows.select(
        "leg", "record", "request_id", "session", "turn", "prompt_tokens", "cached_tokens",
        "output_tokens", "status", "error",
        pl.col("request_id").str.replace("^(?:chatcmpl|cmpl)-", "").alias("external_id"),
        *((pl.col(name) * 1e9).round().cast(pl.Int64, strict=False).alias(column) for name, column in names.items()),
        ((pl.col("first") - pl.col("start")) * 1e3).alias("ttft_ms"),
        ((pl.col("end") - pl.col("start")) * 1e3).alias("e2e_ms"),
        # an answer that came in one chunk shows no pace
        pl.when((pl.col("output_tokens") > 1) & (pl.col("last") > pl.col("first")))
        .then((pl.col("last") - pl.col("first")) * 1e3 / (pl.col("output_tokens") - 1))
        .alias("tpot_ms"),
        pl.when(pl.col("first").is_not_null()).then("ttft_definition").alias("ttft_definition"),
        pl.when(pl.col("first").is_not_null()).then(pl.lit(value=True)).alias("streaming"),
        pl.lit(worker).alias("worker"), pl.lit("client").alias("observer"),
        pl.lit("client").alias("role"), pl.lit("log").alias("role_basis"),
        pl.lit(value=False).alias("container"), pl.lit(WALL).alias("clock"),
        pl.lit(1_000, dtype=pl.Int64).alias("resolution_ns"),  # a double of seconds since 1970
        pl.lit(model, dtype=pl.String).alias("model"),
    )  # fmt: skip


_QUANTITY = {DELAY: "target_to_start", TTFOT: "time_to_first_output_token"}


def _reported(rows: pl.DataFrame, since: str, until: str, definition: str) -> pl.DataFrame:
    """One duration as the file's instants give it, in ms."""
    return rows.filter(pl.col(since).is_not_null() & pl.col(until).is_not_null()).select(
        "leg",
        pl.lit(_QUANTITY[definition]).alias("quantity"),
        ((pl.col(until) - pl.col(since)) * 1e3).alias("value"),
        pl.lit("ms").alias("unit"),
        pl.lit(definition).alias("definition"),
    )
