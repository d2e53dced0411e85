"""What stands in front of a program's own line in a log, taken off whole columns.

It is set by whoever carried the line: docker compose
(`name-1  | `), docker service logs (`name.1.id@node | `), kubectl logs --prefix (`[pod/x/c] `),
--timestamps and docker logs -t (RFC 3339), CRI files (`<time> stdout F `), docker json-file and
fluentd ({"log": ...}), journalctl (short, short-iso, json), logcli jsonl, GCP (textPayload),
stern (`pod container `), logcli and `aws logs tail`, Grafana's text, srun -l, pdsh and grep
(`name: `). The kinds are told from the first lines of a file and then taken off whole columns; up to
four may be nested.
"""

from __future__ import annotations

from dataclasses import field

import orjson
import polars as pl

from pdtrace.records import dataclass

LEVELS = ("TRACE", "DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL", "FATAL", "I", "W", "E")
SAMPLE_LINES = 500  # looked at to tell the wrappers of a file
MOST = 0.6  # share of the sampled lines that must carry a wrapper
MAX_STREAMS = 256  # more distinct names than this are not container names
LAYERS = 4
POD = "pod/"  # streams of Kubernetes containers are pod/<pod>/<container>

SPLIT_LINE = "continuation of a line that the container runtime split"

_ANSI = r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
_RFC3339 = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)"
# Rust's tracing prints its own RFC 3339 stamp before level and target: nobody's prefix.
_OWN_STAMP = r"^\s*(?:TRACE|DEBUG|INFO|WARN|ERROR)\s+[A-Za-z_][\w:.-]*(?:\{|: )"

# Kubernetes ends the names of pods with five of these letters and digits
_POD_NAME = r"-[bcdfghjklmnpqrstvwxz2456789]{5}$"

# name -> pattern with the groups (stream parts ..., time, rest) named s1, s2, time, flag, rest
_WRAPPERS: dict[str, str] = {
    "grafana": rf"^\d{{13}}\t(?P<time>{_RFC3339})\t(?P<rest>.*)$",
    "fluentd": rf"^(?P<time>{_RFC3339})\t(?P<s1>[\w.*-]+)\t(?P<rest>\{{.*)$",
    # one slash: TensorRT-LLM's lines begin with a date in brackets
    "kubectl": r"^\[(?:pod/)?(?P<s1>[a-z0-9][^\s\]/]*/[^\s\]/]+)\] ?(?P<rest>.*)$",
    "cri": rf"^(?P<time>{_RFC3339}) std(?:out|err) (?P<flag>[FP])(?::\S*)? ?(?P<rest>.*)$",
    "logcli": (
        rf"^(?P<time>{_RFC3339}) \{{(?P<s1>(?:[\w.]+=\"[^\"]*\"(?:, ?)?)*)\}} +(?P<rest>.*)$"
    ),
    "cloudwatch": rf"^(?P<time>{_RFC3339}) (?P<s1>[\w.$@-]+/[\w.$@/-]+) (?P<rest>.*)$",
    "journal": rf"^(?P<time>{_RFC3339}) (?P<s1>[\w.-]+) (?P<s2>[^\s:\[\]]+)\[\d+\]: ?(?P<rest>.*)$",
    "journal_full": (
        r"^[A-Z][a-z]{2} (?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?) UTC "
        r"(?P<s1>[\w.-]+) (?P<s2>[^\s:\[\]]+)\[\d+\]: ?(?P<rest>.*)$"
    ),
    "journal_unix": (
        r"^(?P<epoch>1\d{9}\.\d{6}) (?P<s1>[\w.-]+) (?P<s2>[^\s:\[\]]+)\[\d+\]: ?(?P<rest>.*)$"
    ),
    "syslog": (
        r"^[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? "
        r"(?P<s1>[\w.-]+) (?P<s2>[^\s:\[\]]+)\[\d+\]: ?(?P<rest>.*)$"
    ),
    "timestamps": rf"^(?P<time>{_RFC3339}) ?(?P<rest>.*)$",
    "compose": r"^(?P<s1>[A-Za-z0-9][\w.@-]*) +\| ?(?P<rest>.*)$",
    # grep over several files; srun -l and pdsh: a number, or a host's name with a number in it
    "grep": r"^(?P<s1>[\w./-]+\.(?:log|txt|out|err)(?:\.\d+)?):(?:\d{1,9}:)?(?P<rest>.*)$",
    "named": r"^(?P<s1>\d{1,4}|[a-z][a-z-]*\d[a-z0-9.-]*): (?P<rest>.*)$",
    # a script that starts several servers puts a name before each one's lines: [prefill], [D]
    "bracketed": r"^\[(?P<s1>[A-Za-z][\w-]{0,31})\] (?P<rest>.*)$",
    "stern": r"^(?P<s1>[a-z0-9][a-z0-9.-]*-[a-z0-9]+) (?P<s2>[a-z0-9][a-z0-9-]*) (?P<rest>.*)$",
}

_KUBERNETES = ("$.kubernetes.pod.name", "$.kubernetes.container.name")
_FLUENT = ("$.kubernetes.pod_name", "$.kubernetes.container_name")

# how a JSON wrapper spells (text, time, stream parts): JSON paths, alternatives in order
_JSON_WRAPPERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    # Filebeat, Elastic Agent; their `log` says where the line stood
    ("$.message", ("$['@timestamp']",), _KUBERNETES),
    ("$.message", ("$['@timestamp']",), ("$.host.name",)),
    ("$.message", ("$.timestamp",), _FLUENT),  # Vector
    ("$._source.log", ("$._source['@timestamp']", "$._source.time"), ("$._source.kubernetes.pod_name", "$._source.kubernetes.container_name")),
    ("$._source.message", ("$._source['@timestamp']",), ("$._source.kubernetes.pod.name", "$._source.kubernetes.container.name")),
    ("$.result._raw", ("$.result._time",), ("$.result.host", "$.result.source")),  # Splunk
    (
        "$.log",
        ("$.time", "$.timestamp", "$['@timestamp']", "$.date"),
        ("$.kubernetes.pod_name", "$.kubernetes.container_name", "$.container_name"),
    ),
    (
        "$.MESSAGE",
        ("$.__REALTIME_TIMESTAMP",),
        ("$._HOSTNAME", "$._SYSTEMD_UNIT", "$.CONTAINER_NAME"),
    ),
    (
        "$.textPayload",
        ("$.timestamp",),
        ("$.resource.labels.pod_name", "$.resource.labels.container_name"),
    ),
    (
        "$.line",
        ("$.timestamp", "$.ts"),
        ("$.labels.pod", "$.labels.container", "$.labels.instance"),
    ),
    ("$.body", ("$.timestamp", "$.time"), ("$.attributes['k8s.pod.name']", "$.attributes['k8s.container.name']")),
)  # fmt: skip
# of these the carrier must have stamped and named most lines too: loggers write the same keys
_SHARED_KEYS = ("$.message", "$.body")


@dataclass
class Layers:
    """The wrappers of one file, outermost first, and the half records that wait for their rest."""

    names: list[str] = field(default_factory=list)
    json: tuple[str, tuple[str, ...], tuple[str, ...]] | None = None
    tagged: bool = False  # fluentd's time and tag stand before each object
    known: bool = False
    waiting: pl.DataFrame | None = None


def plain(text: pl.Series) -> pl.Series:
    """Without colours; of a line overwritten by carriage returns, what stood there last."""
    if text.str.contains("\x1b", literal=True).any():
        text = text.str.replace_all(_ANSI, "")
    if text.str.contains("\r", literal=True).any():
        text = text.str.replace(r"^.*\r", "")
    return text


def unwrap(frame: pl.DataFrame, layers: Layers) -> pl.DataFrame:
    """The frame with stream, prefix_time_ns, partial; the text without its wrappers."""
    frame = frame.with_columns(
        pl.lit(value).alias(name)
        for name, value in (("stream", ""), ("prefix_time_ns", None), ("partial", False))
        if name not in frame.columns
    ).with_columns(pl.col("prefix_time_ns").cast(pl.Int64))
    if not layers.known and _carries(frame["text"].head(SAMPLE_LINES), "fluentd"):
        layers.tagged = True
    if layers.tagged:
        frame = _off(frame, "fluentd")
    sample = None if layers.known else frame["text"].head(SAMPLE_LINES)
    if sample is not None:
        layers.json = _json_wrapper(sample)
    if layers.json is not None:
        frame = _off_json(frame, layers.json)
    if not layers.known:
        _detect(frame, layers)
    for name in layers.names:
        frame = _off(frame, name)
    return frame


def _detect(frame: pl.DataFrame, layers: Layers) -> None:
    """Find the wrappers of a file from its first lines."""
    sample = frame.head(SAMPLE_LINES).filter(pl.col("text").str.len_chars() > 0)
    layers.known = frame.height >= 20 or layers.json is not None
    layers.names = []
    while sample.height and len(layers.names) < LAYERS:
        able = [name for name in _able(sample["text"]) if name not in layers.names]
        name = next((n for n in able if _carries(sample["text"], n)), None)
        if name is None:
            return
        layers.names.append(name)
        sample = _off(sample, name).filter(pl.col("text").str.len_chars() > 0)


def _able(text: pl.Series) -> list[str]:
    """The wrappers that enough of these lines have, all asked at once: one by one they cost a small file 10 ms."""
    lines = pl.DataFrame({"text": text})
    hits = lines.select(pl.col("text").str.contains(p).sum().alias(n) for n, p in _WRAPPERS.items())
    return [name for name, count in hits.row(0, named=True).items() if count >= _least(text)]


def _least(text: pl.Series) -> float:
    return max(1, MOST * len(text))


def _carries(text: pl.Series, name: str) -> bool:
    """Most of these lines have this wrapper, with few distinct names in it."""
    groups = text.str.extract_groups(_WRAPPERS[name]).struct.unnest()
    hits = groups.filter(pl.col("rest").is_not_null())
    if hits.height < _least(text):
        return False
    if name == "timestamps":
        own = hits["rest"].str.contains(_OWN_STAMP).sum()
        return bool(own < 0.3 * hits.height)
    if "s1" not in groups.columns:
        return True
    names = hits.select([c for c in ("s1", "s2") if c in hits.columns]).unique().height
    if name == "bracketed" and hits["s1"].str.to_uppercase().is_in(LEVELS).any():
        return False
    if name == "stern":
        if hits.height < 0.9 * len(text):
            return False
        if hits["s1"].str.contains(_POD_NAME).all():
            return names <= MAX_STREAMS
        # two bare words are weak evidence: few pairs, many lines
        return len(text) >= 10 and names <= max(2, len(text) // 10)
    return names <= MAX_STREAMS and (names <= 2 or names <= hits.height / 2)


def _off(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    """Take one wrapper off; lines without it stay as they are."""
    groups = frame["text"].str.extract_groups(_WRAPPERS[name]).struct.unnest()
    found = groups["rest"].is_not_null()
    columns: dict[str, pl.Expr | pl.Series] = {
        "text": pl.when(found).then(groups["rest"]).otherwise(frame["text"])
    }
    parts = [groups[c] for c in ("s1", "s2") if c in groups.columns]
    if parts:
        label = parts[0] if len(parts) == 1 else parts[0] + "/" + parts[1]
        label = POD + label if name in ("kubectl", "stern") else label
        outer = frame["stream"]
        both = pl.when(outer == "").then(label).otherwise(outer + "/" + label)
        columns["stream"] = pl.when(found).then(both).otherwise(outer)
    if "time" in groups.columns:
        times = groups.select(rfc3339_ns("time"))["time"]
        columns["prefix_time_ns"] = pl.coalesce(times, frame["prefix_time_ns"])
    if "epoch" in groups.columns:
        micros = (groups["epoch"].cast(pl.Float64, strict=False) * 1e6).round().cast(pl.Int64)
        columns["prefix_time_ns"] = pl.coalesce(micros * 1000, frame["prefix_time_ns"])
    if "flag" in groups.columns:
        columns["partial"] = (groups["flag"] == "P").fill_null(False)
    return frame.with_columns(**columns)


def rfc3339_ns(column: str) -> pl.Expr:
    """RFC 3339 texts of a column as epoch nanoseconds; without a zone they are taken as UTC."""
    text = pl.col(column)
    whole = text.str.slice(0, 19).str.replace(" ", "T", literal=True)
    seconds = whole.str.to_datetime("%Y-%m-%dT%H:%M:%S", strict=False).dt.epoch("s")
    fraction = text.str.extract(r"[.,](\d{1,9})").str.pad_end(9, "0").cast(pl.Int64).fill_null(0)
    zone = r"\d([+-])(\d\d):?(\d\d)$"
    sign = pl.when(text.str.extract(zone, 1) == "-").then(-1).otherwise(1)
    offset = sign * (
        text.str.extract(zone, 2).cast(pl.Int64).fill_null(0) * 3600
        + text.str.extract(zone, 3).cast(pl.Int64).fill_null(0) * 60
    )
    # 2026-11-29 alone ends like a zone: only texts with a time of day have one
    offset = pl.when(text.str.len_chars() > 19).then(offset).otherwise(0)
    return ((seconds - offset) * 1_000_000_000 + fraction).alias(column)


def _json_wrapper(
    sample: pl.Series,
) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """The JSON wrapper that most of these lines are in."""
    lines = sample.filter(sample.str.len_chars() > 0)
    objects = lines.filter(lines.str.starts_with("{"))
    if not len(objects) or len(objects) < MOST * len(lines):
        return None
    for wrapper in _JSON_WRAPPERS:
        needed = wrapper if wrapper[0] in _SHARED_KEYS else wrapper[:1]
        if all(_most_have(objects, paths) for paths in needed):
            return wrapper
    return None


def _most_have(objects: pl.Series, paths: str | tuple[str, ...]) -> bool:
    paths = (paths,) if isinstance(paths, str) else paths
    found = pl.select(pl.coalesce(*[objects.str.json_path_match(path) for path in paths]))
    return bool(found.to_series().is_not_null().sum() >= MOST * len(objects))


def _off_json(
    frame: pl.DataFrame, wrapper: tuple[str, tuple[str, ...], tuple[str, ...]]
) -> pl.DataFrame:
    """Take a JSON wrapper off; lines that are no such object stay as they are."""
    message, times, names = wrapper
    text = frame["text"]
    inner = text.str.json_path_match(message)
    found = inner.is_not_null()
    stamp = pl.coalesce(*[text.str.json_path_match(path) for path in times])
    stamped = pl.DataFrame({"stamp": pl.select(stamp).to_series()}).select(
        pl.coalesce(_epoch_ns("stamp"), rfc3339_ns("stamp"))
    )
    if message == "$.MESSAGE" and inner.str.starts_with("[").any():
        # journalctl -o json writes a text with colours as a list of bytes
        inner = pl.Series([_from_bytes(item) for item in inner], dtype=pl.String)
    parts = [text.str.json_path_match(path) for path in names]
    label = pl.select(pl.concat_str(parts, separator="/", ignore_nulls=True)).to_series()
    if "pod" in names[0]:
        in_pod = text.str.json_path_match(names[0]).is_not_null()
        label = pl.select(pl.when(in_pod).then(POD + label).otherwise(label)).to_series()
    body = inner.str.strip_chars_end("\r\n")
    return frame.with_columns(
        text=pl.when(found).then(plain(body.fill_null(""))).otherwise(text),
        whole=pl.col("whole") | found,  # the object is closed: its text is not half written
        stream=pl.when(found).then(label).otherwise(frame["stream"]),
        prefix_time_ns=pl.when(found)
        .then(pl.coalesce(stamped.to_series(), frame["prefix_time_ns"]))
        .otherwise(frame["prefix_time_ns"]),
        # docker's json-file driver splits at 16 KiB: only the last part ends with a newline
        partial=found
        & ~inner.fill_null("").str.ends_with("\n")
        & (inner.str.len_bytes() >= 16_000),
    )


def _epoch_ns(column: str) -> pl.Expr:
    """Numbers as nanoseconds since the epoch; their size tells whether they count s, ms, µs or ns."""
    whole = pl.col(column).cast(pl.Int64, strict=False)
    seconds = (pl.col(column).cast(pl.Float64, strict=False) * 1e6).round().cast(pl.Int64) * 1000
    return (
        pl.when(whole.is_null()).then(seconds)
        .when(whole < 10**11).then(whole * 10**9)
        .when(whole < 10**14).then(whole * 10**6)
        .when(whole < 10**17).then(whole * 1000)
        .otherwise(whole)
    )  # fmt: skip


def _from_bytes(text: str | None) -> str | None:
    if text is None or not text.startswith("["):
        return text
    try:
        return bytes(orjson.loads(text)).decode("utf-8", "replace")
    except (ValueError, TypeError):
        return text


def join_parts(frame: pl.DataFrame, layers: Layers, *, last: bool) -> pl.DataFrame:
    """Join lines that the runtime split; what waits for its rest stays until the next batch."""
    frame = frame.select("record", "stream", "prefix_time_ns", "text", "partial", "whole")
    if layers.waiting is not None:
        frame = pl.concat([layers.waiting, frame])
        layers.waiting = None
    if not frame["partial"].any():
        return frame.drop("partial").with_columns(pl.lit(1, dtype=pl.Int64).alias("parts"))
    if not last:
        # rows after the last complete row of their stream
        ends = pl.when(~pl.col("partial")).then(pl.col("record")).max().over("stream")
        open_rows = pl.col("record") > ends.fill_null(-1)
        layers.waiting = frame.filter(open_rows)
        frame = frame.filter(~open_rows)
    return whole_lines(frame)


def whole_lines(frame: pl.DataFrame) -> pl.DataFrame:
    group = (~pl.col("partial").shift(1, fill_value=False)).cum_sum().over("stream").alias("group")
    return (
        frame.with_columns(group)
        .group_by("stream", "group", maintain_order=True)
        .agg(
            pl.col("record").first(),
            pl.col("prefix_time_ns").first(),
            pl.col("text").str.join(""),
            pl.col("whole").all(),
            pl.len().cast(pl.Int64).alias("parts"),
        )
        .sort("record")
        .select("record", "stream", "prefix_time_ns", "text", "whole", "parts")
    )
