"""vLLM's line prefix taken apart: process, pid, stamp, place, message; text and JSON alike."""

from __future__ import annotations

import re
from collections.abc import Iterable

import polars as pl

from ._log_wrappers import rfc3339_ns

LEVELS = "DEBUG|INFO|WARNING|ERROR|CRITICAL"
_PROCESS = (
    r"(?:\((?P<process>[^()\s]+)[^()]*?pid=(?P<pid>\d+)[^()]*\)\s+)?"
    # what an engine core prints through its parent carries both
    r"(?:\((?P<inner>[^()\s]+)[^()]*?pid=(?P<inner_pid>\d+)[^()]*\)\s+)?"
)
_STAMP = rf"(?:{LEVELS})\s+(?P<stamp>\d\d-\d\d \d\d:\d\d:\d\d)\s+\[?(?P<place>[^\]\s]+:\d+)\]\s?"
PREFIX = rf"^{_PROCESS}(?:{_STAMP})?"
# VLLM_LOGGING_PREFIX puts a text of the user's choice between process and level
LOOSE_PREFIX = rf"^{_PROCESS}(?:.{{0,80}}?{_STAMP})?"
# the shape of the prefix, at a file of vLLM's that writes log lines (0.6 to 0.32)
_STAMPED = re.compile(rf"(?:{LEVELS}) \d\d-\d\d \d\d:\d\d:\d\d \[?(?:[\w./-]*/)?(\w+)\.py:\d+\]")
_FILES = re.compile(
    r"loggers|metrics|core|core_client|async_llm|async_llm_engine|llm_engine|engine|api_server|api_utils|"
    r"launcher|request_logger|logger|scheduler|(?:gpu|cpu|tpu|xpu)_(?:model_runner|worker)|model_runner|"
    r"kv_cache_utils|serving\w*|factory|\w*connector|parallel_state|multiproc_executor|vllm|async_utils"
)
_LOGGER = re.compile(r'"(?:name|logger)": ?"vllm(?:[."])')
_WORDS = (
    "vLLM",
    "vllm",
    "LLM engine (v",
    "Avg prompt throughput: ",
    "iteration elapsed time: ",
    "SamplingParams(",
    "Added request ",
    "KV Transfer metrics: ",
    "KV cache size: ",
    "# GPU blocks: ",
    "Sequence group ",
)
_OWN_WORDS = ("Avg prompt throughput: ", "iteration elapsed time: ", "params: SamplingParams(")
_JSON_MESSAGE = ("$.message", "$.msg")
_JSON_TIME = ("$.asctime", "$.timestamp", "$.time")


def vllm_form(lines: Iterable[str]) -> str | None:
    """'' when one of these lines is vLLM's, ' (JSON)' for its JSON formatter's, else None."""
    for line in lines:
        if line.startswith("{"):
            own = _LOGGER.search(line) or any(word in line for word in _OWN_WORDS)
            if own and '"message"' in line:
                return " (JSON)"
            continue
        found = _STAMPED.search(line[:400])
        if found and (_FILES.fullmatch(found[1]) or any(word in line for word in _WORDS)):
            return ""
    return None


def with_fields(lines: pl.DataFrame) -> pl.DataFrame:
    """The lines with process, pid, stamp (MM-DD HH:MM:SS), place, json_time_ns and message."""
    lines = _from_json(lines)
    text = lines["text"]
    groups = text.str.extract_groups(PREFIX).struct.unnest()
    pattern = PREFIX
    if groups["stamp"].null_count() > 0.9 * lines.height:
        loose = text.str.extract_groups(LOOSE_PREFIX).struct.unnest()
        if loose["stamp"].null_count() < 0.5 * lines.height:
            groups, pattern = loose, LOOSE_PREFIX
    lines = _replicas_apart(lines, groups["process"])
    frame = lines.with_columns(
        pl.coalesce(groups["inner"], groups["process"], "json_process").alias("process"),
        pl.coalesce(groups["inner_pid"], groups["pid"], "json_pid").alias("pid"),
        groups["stamp"],
        groups["place"],
    ).drop("json_process", "json_pid")
    # steps are parsed by their text, and may be nearly all lines of a log
    message = pl.when(~is_step(text)).then("text").otherwise(None)
    return frame.with_columns(message.str.replace(pattern, "").alias("message"))


def _replicas_apart(lines: pl.DataFrame, process: pl.Series) -> pl.DataFrame:
    """Ray prints the lines of all replicas of a deployment into one log: each is a stream of its own.

    Source: ray-project/ray, `(ServeReplica:<app>:<deployment> pid=N[, ip=A]) ` before each line.
    """
    replica = process.str.starts_with("ServeReplica:")
    if not replica.any():
        return lines
    name = pl.col("text").str.extract(r"^\((ServeReplica:[^()]*)\)")
    own = pl.when(pl.col("stream") == "").then(name).otherwise(pl.col("stream") + "/" + name)
    return lines.with_columns(
        pl.when(replica.fill_null(value=False)).then(own).otherwise("stream").alias("stream")
    )


def is_step(text: pl.Series) -> pl.Series:
    """Iteration lines, but not prompts or answers that speak of them."""
    found = text.str.contains("Iteration(", literal=True)
    if not found.any():
        return found
    return found & ~text.str.contains_any(["Received request ", "Generated response ", "prompt: "])


def _from_json(lines: pl.DataFrame) -> pl.DataFrame:
    """JSON objects of a log formatter become their message; their time, with its year, is kept."""
    empty = pl.lit(None, dtype=pl.String)
    text = lines["text"]
    is_object = text.str.starts_with("{")
    columns = {
        "json_process": empty,
        "json_pid": empty,
        "json_time_ns": pl.lit(None, dtype=pl.Int64),
    }
    if not is_object.any():
        return lines.with_columns(**columns)
    objects = pl.select(pl.when(is_object).then(text)).to_series()

    def field(*paths: str) -> pl.Series:
        return pl.select(pl.coalesce(*[objects.str.json_path_match(p) for p in paths])).to_series()

    message = field(*_JSON_MESSAGE)
    times = pl.DataFrame({"time": field(*_JSON_TIME)}).select(rfc3339_ns("time"))["time"]
    return lines.with_columns(
        text=pl.coalesce(message, text),
        json_process=field("$.processName"),
        json_pid=field("$.process"),
        json_time_ns=times,
    )
