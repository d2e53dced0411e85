"""Request lines of vLLM (Received, Added, Finished, aborted, failed, Generated) as legs.

The front end logs the external id (`cmpl-x-0`), the engine an internal one: a child of n > 1 is
`<index>_<id>`, since 0.14 with `-<8 hex>` behind. One leg per request, whatever lines it has; V1
logs no normal end, so its outcome is often unknown. Prompts and answers are never looked at.
"""

from __future__ import annotations

import polars as pl

from . import _vllm_log_lmcache as lmcache
from ._vllm_ids import external_id
from ._vllm_log_runs import Run

FOLDED = "line of a request, kept in its leg"
NO_REQUEST = "not a request (tokenize)"
CONTENT = "prompt or answer text, not kept"
SECOND_NS = 1_000_000_000
ANSWER_WINDOW_NS = 5 * SECOND_NS  # between a request's failure in the log and its HTTP error

# kind -> pattern with the id in group 1; tried on the message
PATTERNS = {
    "received": r"^Received request (\S+): ",
    "added": r"^Added request (\S+?)\.?$",
    "finished": r"^Finished request (\S+?)\.?$",
    "aborted": r"^Request (\S+) aborted\b",
    "aborted_internal": r"^Aborted request(?:\(s\))? (\S+?)\.?$",
    "failed": r"^Request (\S+) failed\b",
    "delta": r"^Generated response (\S+) \(streaming delta\)",
    "generated": r"^Generated response ([^\s:]+)",
    "params": r"^Parameters of (\S+): ",  # rewritten by us: the end of a prompt that spans lines
    "kv_start": r"^start_load_kv for request (\S+) from remote engine ",
    "kv_end": r"^Finished recving KV transfer for request (\S+?)\.?$",
}
TRANSFERS = ("kv_start", "kv_end")
# in whole columns: a line that may be one of these
MARKERS = (
    "Received request ",
    "Added request ",
    "Finished request ",
    "Aborted request",
    "Generated response ",
    " aborted.",
    " failed (",
    " failed due to",
    "start_load_kv for request ",
    "Finished recving KV transfer ",
)
OPENS_PROMPT = r"(?:Received request (\S+): |Request (\S+) details: )prompt: "
ENDS_PROMPT = r"(?:lora_request: |prompt_token_ids: |prompt_embeds shape: )"
_CHILD = r"^\d+_"
_HEX = r"-[0-9a-f]{8}$"
GENERATION_PATH = r"^(?:/[\w.-]+)*?/(?:chat/completions|completions|responses|messages|generate)/?$"


def parse(lines: pl.DataFrame) -> pl.DataFrame:
    """Request events among these lines: record, run, time, action, id and what they say of it."""
    message = pl.col("message")
    ids = [message.str.extract(pattern).alias(kind) for kind, pattern in PATTERNS.items()]
    action = pl.coalesce(*[pl.when(pl.col(k).is_not_null()).then(pl.lit(k)) for k in PATTERNS])
    params = r"^.*params: SamplingParams\(.*"
    return (
        lines.with_columns(ids)
        .with_columns(action.alias("action"), pl.coalesce(*PATTERNS).alias("id"))
        .filter(pl.col("action").is_not_null())
        .select(
            "record",
            "run",
            "time_ns",
            "resolution_ns",
            "action",
            pl.col("id").str.split(",").alias("id"),
            message.str.extract(params + r"\bmax_tokens=(\d+)").cast(pl.Int64).alias("max_tokens"),
            message.str.extract(r"^.*params: SamplingParams\(n=(\d+)").cast(pl.Int64).alias("n"),
            message.str.extract(r"finish_reason: (\w+)$")
            .replace("None", None)
            .alias("finish_reason"),
            message.str.contains(r"^Generated response \S+ \(streaming").alias("streaming"),
            pl.when(pl.col("action") == "failed").then(_why(message)).alias("error"),
            message.str.extract(r"^start_load_kv .* from remote engine ([\w-]+)").alias("remote"),
        )
        .explode("id")
    )


def _why(message: pl.Expr) -> pl.Expr:
    """Kind of a failure: what stands in brackets, or the exception's class; never its text."""
    return pl.coalesce(
        message.str.extract(r" failed \(([a-z ]+)\)"),
        message.str.extract(r" failed due to (\w*(?:Error|Exception|Exit))\b"),
        pl.lit("failed"),
    )


def with_legs(lines: pl.DataFrame, events: pl.DataFrame, legs: pl.DataFrame) -> pl.DataFrame:
    """LMCache's lines with the request_id and the leg of the request that they name, NULL where none."""
    named = _occurrences(events.filter(~pl.col("action").is_in(TRANSFERS)))
    named = named.filter(pl.col("action") == lmcache.ACTION)
    known = legs.select("run", "request_id", "occurrence", "leg")
    named = named.join(known, on=["run", "request_id", "occurrence"], how="left")
    return lines.join(
        named.select("record", "request_id", "leg"), on="record", how="left", maintain_order="left"
    )


def is_request(name: str = "id") -> pl.Expr:
    """False for ids of utility calls that the engine never sees."""
    return ~pl.col(name).str.contains(r"^(?:de)?tokenize-")


def legs(events: pl.DataFrame, path: str, runs: list[Run]) -> pl.DataFrame:
    """One leg per request of one source; `run`, `admitted` and the records of its ends beside."""
    frame = _occurrences(events.filter(~pl.col("action").is_in(TRANSFERS)))
    grouped = frame.group_by("run", "request_id", "occurrence", maintain_order=True).agg(
        pl.col("record").first(),
        # a lookup in a cache comes when the scheduler tries a request, not when it arrives
        pl.col("time_ns").filter(pl.col("action") != lmcache.ACTION).first().alias("start_ns"),
        pl.col("resolution_ns").first(),
        pl.col("max_tokens").drop_nulls().first(),
        pl.col("n").drop_nulls().first(),
        pl.col("finish_reason").drop_nulls().first(),
        pl.col("error").drop_nulls().first(),
        pl.col("streaming").any(),
        pl.col("action").is_in(["added", "delta", "generated", "finished"]).any().alias("admitted"),
        _first("record", "finished", "generated").alias("finished"),
        _first("record", "failed").alias("failed"),
        _first("record", "aborted", "aborted_internal").alias("aborted"),
        _first("time_ns", "finished", "generated").alias("finished_ns"),
        _first("time_ns", "failed").alias("failed_ns"),
        _first("time_ns", "aborted", "aborted_internal").alias("aborted_ns"),
        _first("time_ns", "delta").alias("first_token_ns"),
        (pl.col("action") == "received").any().alias("received"),
        (pl.col("action") == lmcache.ACTION).any().alias("looked_up"),
    )
    # the first final line counts: an abort after the end is the connection's
    ends = {"completed": "finished", "failed": "failed", "aborted": "aborted"}
    last = pl.min_horizontal(*ends.values())
    status = pl.coalesce(*[pl.when(pl.col(c) == last).then(pl.lit(s)) for s, c in ends.items()])
    end_ns = pl.coalesce(
        *[pl.when(pl.col(c) == last).then(pl.col(f"{c}_ns")) for c in ends.values()]
    )
    # an event that has no start line says nothing of the arrival
    started = pl.col("received") | (pl.col("record") != last).fill_null(True)
    return _named(
        grouped.with_columns(
            status.fill_null("unknown").alias("status"),
            end_ns.alias("end_ns"),
            pl.when(started).then("start_ns").alias("start_ns"),
        ),
        path,
        runs,
    )


def _first(column: str, *actions: str) -> pl.Expr:
    return pl.col(column).filter(pl.col("action").is_in(actions)).first()


def transfers(events: pl.DataFrame, runs: list[Run]) -> pl.DataFrame:
    """KV loads that DEBUG lines tell of: from their start to 'Finished recving'."""
    info = pl.DataFrame(
        [(n, run.worker, run.facts.get("kv_connector")) for n, run in enumerate(runs)],
        schema={"run": pl.Int32, "destination_worker": pl.String, "backend": pl.String},
        orient="row",
    )
    moved = events.filter(pl.col("action").is_in(TRANSFERS))
    # an id that is loaded again begins another transfer
    again = (
        (pl.col("action") == "kv_start")
        .cast(pl.Int64)
        .cum_sum()
        .over("run", "id")
        .clip(lower_bound=1)
    )
    return (
        moved.with_columns(again.alias("again"))
        .group_by("run", "id", "again", maintain_order=True)
        .agg(
            pl.col("record").first(),
            pl.col("request_id").first(),
            pl.col("remote").drop_nulls().first(),
            _first("time_ns", "kv_start").alias("start_ns"),
            _first("time_ns", "kv_end").alias("end_ns"),
        )
        .join(info, on="run", how="left", maintain_order="left")
        .select(
            "record",
            "request_id",
            "destination_worker",
            "start_ns",
            "end_ns",
            "backend",
            pl.when(pl.col("remote").is_not_null())
            .then("engine_id:" + pl.col("remote"))
            .alias("source_worker"),
            pl.lit("prefill_to_decode").alias("direction"),
            pl.when(pl.col("end_ns").is_not_null()).then(pl.lit("completed")).alias("outcome"),
        )
    )


def with_request_ids(events: pl.DataFrame) -> pl.DataFrame:
    """The events with request_id, in the spelling that the front end logged in the same run."""
    events = events.sort("record")
    received = events.filter(pl.col("action") == "received").select("run", pl.col("id")).unique()
    known = received["run"].cast(pl.String) + "\0" + received["id"]

    def if_known(candidate: pl.Expr) -> pl.Expr:
        key = pl.concat_str([pl.col("run").cast(pl.String), candidate], separator="\0")
        return pl.when(key.is_in(known.implode())).then(candidate)

    raw = pl.col("id")
    bare, parent = raw.str.replace(_HEX, ""), raw.str.replace(_CHILD, "")
    internal = pl.col("action").is_in(["added", "aborted_internal", lmcache.ACTION, *TRANSFERS])
    # without the front end's lines: a suffix that nearly all internal ids of a run have is the
    # engine's
    suffixed = raw.str.contains(_HEX).filter(internal).mean().over("run").fill_null(0) >= 0.9
    stripped = pl.when(internal & suffixed).then(bare).otherwise(raw)
    child = stripped.str.contains(r"^\d+_[a-z]+-")
    guess = pl.when(internal & child).then(stripped.str.replace(_CHILD, "")).otherwise(stripped)
    return events.with_columns(
        pl.coalesce(
            if_known(raw),
            if_known(bare),
            if_known(parent),
            if_known(parent.str.replace(_HEX, "")),
            guess,
        ).alias("request_id"),
    )


def _occurrences(events: pl.DataFrame) -> pl.DataFrame:
    """The events with occurrence: ids are used again, by a second run of a load generator."""
    key = ["run", "request_id"]
    received = pl.col("action") == "received"
    first_child = (pl.col("action") == "added") & ~pl.col("id").str.contains(r"^[1-9]\d*_")
    opens = pl.when(received.any().over(key)).then(received).otherwise(first_child)
    return events.with_columns(
        opens.cast(pl.Int64).cum_sum().over(key).clip(lower_bound=1).alias("occurrence")
    )


def _named(frame: pl.DataFrame, path: str, runs: list[Run]) -> pl.DataFrame:
    """The rows with leg, worker, role, external id, model and durations."""
    info = pl.DataFrame(
        [
            {
                "run": index,
                "worker": run.worker,
                "role": run.role,
                "role_basis": "config" if run.role else None,
                "model": run.model,
                "place": run.stream + (f":{run.number}" if run.number > 1 else ""),
            }
            for index, run in enumerate(runs)
        ],
        schema={
            "run": pl.Int32,
            "worker": pl.String,
            "role": pl.String,
            "role_basis": pl.String,
            "model": pl.String,
            "place": pl.String,
        },
    )
    again = (
        pl.when(pl.col("occurrence") > 1).then(pl.format("~{}", "occurrence")).otherwise(pl.lit(""))
    )
    place = pl.when(pl.col("place") != "").then("/" + pl.col("place")).otherwise(pl.lit(""))
    return frame.join(info, on="run", how="left", maintain_order="left").with_columns(
        pl.concat_str([pl.lit(f"{path}#"), pl.col("request_id"), again, place]).alias("leg"),
        external_id(pl.col("request_id")).alias("external_id"),
        pl.lit("engine").alias("observer"),
        pl.lit("wall").alias("clock"),
        ((pl.col("end_ns") - pl.col("start_ns")) / 1e6).alias("e2e_ms"),
        ((pl.col("first_token_ns") - pl.col("start_ns")) / 1e6).alias("ttft_ms"),
        pl.when("streaming").then(True).alias("streaming"),
        pl.when(pl.col("n") > 1).then(pl.format("n={}", "n")).alias("note"),
        pl.when(pl.col("first_token_ns").is_not_null())
        .then(
            pl.lit(
                "vLLM log: 'Received request' to the first 'Generated response (streaming delta)'"
            )
        )
        .alias("ttft_definition"),
    )


# a POST that was answered with an error: record, run, time, HTTP status
Answer = tuple[int, int, int | None, int]

LEG_COLUMNS = (
    "prompt_tokens",
    "cached_tokens",
    "record",
    "leg",
    "worker",
    "observer",
    "role",
    "role_basis",
    "request_id",
    "external_id",
    "clock",
    "start_ns",
    "first_token_ns",
    "end_ns",
    "resolution_ns",
    "ttft_ms",
    "ttft_definition",
    "e2e_ms",
    "model",
    "max_tokens",
    "streaming",
    "status",
    "finish_reason",
    "error",
    "note",
)


def pair_answers(
    frame: pl.DataFrame, answers: list[Answer]
) -> tuple[dict[int, Answer], list[Answer]]:
    """Which HTTP errors belong to requests that the log already told of.

    `answers` are (record, run, time, status) of failed POSTs. Returns record of a leg -> its
    answer, and the answers that belong to no leg: requests that were refused before they were logged.
    """
    if not answers:
        return {}, []
    adds = {run for run, admitted in frame.select("run", "admitted").iter_rows() if admitted}
    open_legs = [
        row
        for row in frame.select(
            "record",
            "run",
            "failed",
            "failed_ns",
            "start_ns",
            pl.col("admitted") | pl.col("looked_up"),
            "status",
        ).iter_rows()
        if row[6] == "failed" or (row[6] == "unknown" and not row[5] and row[1] in adds)
    ]
    open_legs.sort(key=lambda row: row[2] or row[0])
    taken: dict[int, Answer] = {}
    left = []
    for record, run, time_ns, status in answers:
        match = next(
            (
                leg
                for leg in open_legs
                if leg[1] == run
                and leg[0] not in taken
                and (leg[2] or leg[0]) < record
                and _soon(leg[3] or leg[4], time_ns)
            ),
            None,
        )
        if match is None:
            left.append((record, run, time_ns, status))
        else:
            taken[match[0]] = (record, run, time_ns, status)
    return taken, left


def _soon(before_ns: int | None, after_ns: int | None) -> bool:
    return before_ns is None or after_ns is None or 0 <= after_ns - before_ns <= ANSWER_WINDOW_NS


def answered(legs: pl.DataFrame, taken: dict[int, Answer]) -> pl.DataFrame:
    """The legs with the HTTP status of their answer where that was an error."""
    if not taken:
        return legs
    statuses = {leg: answer[3] for leg, answer in taken.items()}
    status = pl.col("record").replace_strict(statuses, default=None, return_dtype=pl.Int64)
    return legs.with_columns(
        pl.when(status.is_not_null()).then(pl.lit("failed")).otherwise("status").alias("status"),
        pl.when(status.is_not_null())
        .then(pl.format("HTTP {}", status))
        .otherwise("error")
        .alias("error"),
    )
