"""SGLang server logs: batches as samples, requests, time stats, KV failures, retractions, settings.

Source: sgl-project/sglang 0.4.6 to 0.5.23, `[YYYY-MM-DD HH:MM:SS DP0 TP0] message`, text, and JSON request
events behind the same prefix (`--log-requests-format json`). Clock: wall, local time of day without a
zone, whole seconds (SGLANG_LOG_MS: milliseconds); the zone is found where lines state an epoch, too.
"""

from __future__ import annotations

from pdtrace.model import Head, Match, Sink, Source

from ._loglines import head_texts

TITLE = "SGLang"
ENGINE = "SGLang"
SWITCHES = {
    "queue_wait": "--enable-request-time-stats-logging (a line a request, without OpenTelemetry), or --enable-trace",
    "prefill_time": "--enable-trace --otlp-traces-endpoint HOST:4317",
    "decode_time": "--enable-trace --otlp-traces-endpoint HOST:4317, or --enable-request-time-stats-logging",
    "token_times": "--enable-trace at trace level 3 (the default): one span a decode iteration",
    "first_token": "--log-requests with --enable-metrics (0.5.6 or later)",
    "cached_tokens": "--log-requests, or --enable-request-time-stats-logging (0.5.12 or later)",
    "arrival_time": "--log-requests with --enable-metrics (0.5.6 or later)",
    "engine_steps": "pdtrace run -- python -m sglang.launch_server ...: its log has no line for each step",
    "kv_usage": "--enable-metrics and a scrape once a second, or the batch lines of the log",
    "engine_counters": "--enable-metrics and a scrape once a second, or the batch lines of the log",
    "kv_transfer": "--enable-trace on the prefill and the decode servers; --trace-modules request,mooncake adds the sender",
    "kv_transfer_bytes": "--enable-request-time-stats-logging on the prefill servers (0.5.8 or later)",
}  # fmt: skip


# What stands in every line that only SGLang writes; the line itself is looked at behind it.
_WORDS = (
    b" batch", b"ServerArgs(", b"ReqInput(", b"Time Stats(rid=", b"TimeStats(rid=", b"request.received", b"request.finished",
    b"failed for request rank=", b" TP", b" DP", b" PP", b" EP",
)  # fmt: skip


def sniff(head: Head) -> Match | None:
    """A log whose head has a line that only SGLang writes."""
    if not any(word in head.data for word in _WORDS):
        return None
    from ._sglang_log_frame import is_sglang

    return Match("exact", "SGLang server log") if is_sglang(head_texts(head)) else None


def read(source: Source, out: Sink) -> None:
    """Read one log; requests are put together at its end."""
    from ._loglines import log_batches
    from ._sglang_log_reader import Reader

    out.unit("line")
    reader = Reader(source, out)
    for batch in log_batches(source):
        reader.batch(batch)
    reader.close()
