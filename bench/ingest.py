"""OTLP spans to a queryable table: pdtrace and chDB (ClickHouse in process) on the same files, side by side.

Data: 7 spans a request (gateway, router, worker, queue, prefill, kv_transfer, decode), 12 attributes a span,
0-2 events, 4 resource attributes, 4 + 4 workers, about 1,000 spans a message, made here from a seed.
`--unseen` adds 30 attributes to every span whose keys no code has ever heard of.

Each run is a fresh process, timed from start to end: pdtrace with all that `pdtrace ingest -o` does to read and
deduplicate, chDB with its session and one INSERT. The stages behind the table (identity, phases, views, ...) are
timed apart, as what a whole `pdtrace ingest -o` takes longer (`--table-only` leaves that out).

    python -m bench.ingest                       100,000 spans, median of 3
    python -m bench.ingest --spans 1000000       what the goals are about
"""

from __future__ import annotations

import argparse
import random
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import orjson

from bench.measure import Run, run, table

SPANS_PER_MESSAGE = 1022
WORKERS = [
    "gateway",
    "router",
    *(f"prefill-{i}" for i in range(4)),
    *(f"decode-{i}" for i in range(4)),
]
UNSEEN = [f"acme.{kind}.property_{i}" for i in range(10) for kind in ("text", "count", "level")]

Attributes = dict[str, str | int | float]


@dataclass
class Span:
    """A span before it is written in either format."""

    ids: tuple[bytes, bytes, bytes]
    name: str
    kind: int
    start: int
    end: int
    attributes: Attributes
    events: tuple[tuple[str, int], ...] = ()


def requests(count: int, *, unseen: bool) -> Iterator[list[tuple[str, Span]]]:
    """The spans of one request after the other, each with its service."""
    draw = random.Random(11)
    now = 1_790_000_000_000_000_000
    for _ in range(count):
        now += int(draw.expovariate(50) * 1e9)
        trace, spans = draw.randbytes(16), [draw.randbytes(8) for _ in range(7)]
        prompt, output = int(draw.lognormvariate(6.5, 1.1)), 1 + int(draw.expovariate(1 / 200))
        prefill, decode = f"prefill-{draw.randrange(4)}", f"decode-{draw.randrange(4)}"
        routed, queued = now + 300_000, now + 800_000
        started = queued + int(draw.expovariate(1 / 20e6))
        moved = started + prompt * 60_000 + 5_000_000
        landed = moved + prompt * 9_000 + 1_000_000
        end = landed + output * 22_000_000

        def common(phase: str, worker: str, more: Attributes) -> Attributes:
            attributes: Attributes = {
                "gen_ai.request.id": f"chatcmpl-{trace.hex()}",  # noqa: B023
                "gen_ai.request.model": "meta-llama/Llama-3.1-70B-Instruct",
                "gen_ai.operation.name": "chat",
                "gen_ai.usage.input_tokens": prompt,  # noqa: B023
                "gen_ai.usage.output_tokens": output,  # noqa: B023
                "gen_ai.request.max_tokens": 1024,
                "gen_ai.request.temperature": 0.7,
                "llm.serving.phase": phase,
                "llm.serving.worker": worker,
                "llm.serving.cached_tokens": prompt // 3,  # noqa: B023
                **more,
            }
            if unseen:
                for key in UNSEEN:
                    if ".text." in key:
                        attributes[key] = f"{key[-1]}-{draw.randrange(50)}"
                    elif ".count." in key:
                        attributes[key] = draw.randrange(100_000)
                    else:
                        attributes[key] = draw.random()
            return attributes

        root = {"http.response.status_code": 200, "server.address": "10.0.0.1"}
        choice = {"llm.router.policy": "kv_aware", "llm.router.overlap_blocks": prompt // 48}
        latency = {
            "gen_ai.latency.time_to_first_token": (moved - started) / 1e9,
            "gen_ai.latency.e2e": (end - now) / 1e9,
        }
        waiting = {"llm.queue.depth": draw.randrange(64), "llm.queue.policy": "fcfs"}
        chunks = {"llm.prefill.chunks": 1 + prompt // 2048, "llm.batch.size": draw.randrange(1, 32)}
        kv = {"llm.kv.bytes": prompt * 327_680, "llm.kv.backend": "nixl"}
        steps = {"llm.decode.steps": output, "llm.batch.size": draw.randrange(1, 128)}
        first, last = ("first_token", landed + 22_000_000), ("finish", end)
        rows = [
            ("gateway", 0, -1, "POST /v1/chat/completions", 2, now, end + 400_000, common("gateway", "gateway", root), ()),
            ("router", 1, 0, "router.schedule", 1, routed, queued, common("router", "router", choice), ()),
            (prefill, 2, 1, "llm_request", 2, queued, landed, common("worker", prefill, latency), ()),
            (prefill, 3, 2, "queue", 1, queued, started, common("queue", prefill, waiting), ()),
            (prefill, 4, 2, "prefill", 1, started, moved, common("prefill", prefill, chunks), (("chunk", (started + moved) // 2),)),
            (prefill, 5, 2, "kv_transfer", 3, moved, landed, common("kv_transfer", prefill, kv), ()),
            (decode, 6, 1, "decode", 2, landed, end, common("decode", decode, steps), (first, last)),
        ]  # fmt: skip
        yield [
            (
                service,
                Span(
                    (trace, spans[i], spans[up] if up >= 0 else b""),
                    name,
                    kind,
                    a,
                    b,
                    attributes,
                    events,
                ),
            )
            for service, i, up, name, kind, a, b, attributes, events in rows
        ]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def block(tag: bytes, data: bytes) -> bytes:
    size = len(data)
    return tag + (bytes((size,)) if size < 128 else varint(size)) + data


def pair(tag: bytes, key: str, value: str | int | float) -> bytes:
    if isinstance(value, str):
        inner = block(b"\x0a", value.encode())
    elif isinstance(value, int):
        inner = b"\x18" + varint(value)
    else:
        inner = b"\x21" + struct.pack("<d", value)
    return block(tag, block(b"\x0a", key.encode()) + block(b"\x12", inner))


def span_message(span: Span) -> bytes:
    trace, own, parent = span.ids
    parts = [block(b"\x0a", trace), block(b"\x12", own), block(b"\x22", parent) if parent else b""]
    parts += [block(b"\x2a", span.name.encode()), bytes((0x30, span.kind))]
    parts.append(struct.pack("<BQBQ", 0x39, span.start, 0x41, span.end))
    parts += [pair(b"\x4a", key, value) for key, value in span.attributes.items()]
    for name, at in span.events:
        parts.append(
            block(
                b"\x5a",
                struct.pack("<BQ", 0x09, at)
                + block(b"\x12", name.encode())
                + pair(b"\x1a", "n", 1),
            )
        )
    return b"".join([*parts, b"\x7a\x02\x18\x01"])


def json_attributes(attributes: Attributes) -> list[dict[str, object]]:
    return [
        {"key": key, "value": {"stringValue": v} if isinstance(v, str) else {"intValue": str(v)} if isinstance(v, int) else {"doubleValue": v}}
        for key, v in attributes.items()
    ]  # fmt: skip


def span_object(span: Span) -> dict[str, object]:
    trace, own, parent = span.ids
    found: dict[str, object] = {
        "traceId": trace.hex(), "spanId": own.hex(), "parentSpanId": parent.hex(), "name": span.name, "kind": span.kind,
        "startTimeUnixNano": str(span.start), "endTimeUnixNano": str(span.end),
        "attributes": json_attributes(span.attributes), "status": {"code": 1},
    }  # fmt: skip
    if span.events:
        one = json_attributes({"n": 1})
        found["events"] = [
            {"timeUnixNano": str(at), "name": name, "attributes": one} for name, at in span.events
        ]
    return found


def generate(folder: Path, spans: int, *, unseen: bool) -> int:
    """Write otlp.pb (length-prefixed), otlp.jsonl and pb/*.pb (one message a file); returns the spans."""
    (folder / "pb").mkdir(parents=True)
    written = number = 0
    with (folder / "otlp.pb").open("wb") as framed, (folder / "otlp.jsonl").open("wb") as lines:
        batch: dict[str, list[Span]] = {}
        total = spans // 7
        for index, request in enumerate(requests(total, unseen=unseen), 1):
            for service, span in request:
                batch.setdefault(service, []).append(span)
            written += 7
            if index % (SPANS_PER_MESSAGE // 7) and index < total:
                continue
            message, resources = b"", []
            for service in sorted(batch, key=WORKERS.index):
                about: Attributes = {
                    "service.name": service,
                    "service.version": "0.9.1",
                    "host.name": "node-3",
                    "k8s.pod.name": f"{service}-abcde",
                }
                resource = b"".join(pair(b"\x0a", key, value) for key, value in about.items())
                scope = block(b"\x0a", b"llm.serving") + block(b"\x12", b"1.0")
                body = block(b"\x0a", scope) + b"".join(
                    block(b"\x12", span_message(s)) for s in batch[service]
                )
                message += block(b"\x0a", block(b"\x0a", resource) + block(b"\x12", body))
                scope_spans = {
                    "scope": {"name": "llm.serving", "version": "1.0"},
                    "spans": [span_object(s) for s in batch[service]],
                }
                resources.append(
                    {
                        "resource": {"attributes": json_attributes(about)},
                        "scopeSpans": [scope_spans],
                    }
                )
            framed.write(struct.pack(">I", len(message)) + message)
            (folder / "pb" / f"{number:05}.pb").write_bytes(message)
            lines.write(orjson.dumps({"resourceSpans": resources}) + b"\n")
            batch, number = {}, number + 1
    return written


# ---- the contestants, each run in a process of its own ---------------------------------------------


def run_table(source: Path, target: Path) -> None:
    """The collector, the store and the removal of duplicates, without the stages behind them."""
    from pdtrace import reading, spans
    from pdtrace.collectors import otlp
    from pdtrace.inputs import expand
    from pdtrace.store import Store

    assert otlp
    store = Store(target)
    inputs = expand([str(source)])
    with store.bulk_load():
        accounts = reading.read_all(inputs, store)
    reading.write_sources(store, accounts)
    spans.deduplicate(store.connection)
    store.execute("CHECKPOINT")
    store.close()


CHDB_SCHEMA = """CREATE TABLE o.spans (
  Timestamp DateTime64(9) CODEC(Delta(8), ZSTD(1)), TraceId String CODEC(ZSTD(1)), SpanId String CODEC(ZSTD(1)),
  ParentSpanId String CODEC(ZSTD(1)), SpanName LowCardinality(String), SpanKind Int32,
  ServiceName LowCardinality(String), ResourceAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  SpanAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)), Duration UInt64 CODEC(T64, ZSTD(1)),
  StatusCode Int32, EventsTs Array(UInt64) CODEC(ZSTD(1)), EventsName Array(LowCardinality(String)) CODEC(ZSTD(1))
) ENGINE = MergeTree ORDER BY (ServiceName, SpanName, toDateTime(Timestamp))"""

CHDB_PROTO = """syntax = "proto3"; package o;
message Any { oneof value { string string_value = 1; bool bool_value = 2; int64 int_value = 3; double double_value = 4; } }
message KV { string key = 1; Any value = 2; }
message Resource { repeated KV attributes = 1; }
message Event { fixed64 time_unix_nano = 1; string name = 2; }
message Status { int32 code = 3; }
message Span { bytes trace_id = 1; bytes span_id = 2; bytes parent_span_id = 4; string name = 5; int32 kind = 6;
  fixed64 start_time_unix_nano = 7; fixed64 end_time_unix_nano = 8; repeated KV attributes = 9;
  repeated Event events = 11; Status status = 15; }
message ScopeSpans { repeated Span spans = 2; }
message ResourceSpans { Resource resource = 1; repeated ScopeSpans scope_spans = 2; }
message Req { repeated ResourceSpans resource_spans = 1; }
"""


def chdb_insert(folder: Path, kind: str) -> str:
    """The INSERT that fills the table of OpenTelemetry's ClickHouse exporter from the files."""
    if kind == "json":
        value = "Tuple(stringValue Nullable(String), intValue Nullable(String), doubleValue Nullable(Float64))"
        text = "coalesce(x.value.stringValue, x.value.intValue, toString(x.value.doubleValue), '')"
        names = [
            "traceId",
            "spanId",
            "parentSpanId",
            "startTimeUnixNano",
            "endTimeUnixNano",
            "timeUnixNano",
            "scopeSpans",
            "resourceSpans",
        ]
        source, more = (
            f"file('{folder}/otlp.jsonl', 'JSONEachRow', %s)",
            "input_format_json_ignore_unknown_keys_in_named_tuple = 1",
        )
        ids = ["sp.traceId", "sp.spanId", "sp.parentSpanId"]
    else:
        value = "Tuple(string_value String, int_value Int64, double_value Float64)"
        text = "multiIf(x.value.string_value != '', x.value.string_value, x.value.int_value != 0, toString(x.value.int_value), toString(x.value.double_value))"
        names = [
            "trace_id",
            "span_id",
            "parent_span_id",
            "start_time_unix_nano",
            "end_time_unix_nano",
            "time_unix_nano",
            "scope_spans",
            "resource_spans",
        ]
        source, more = (
            f"file('{folder}/pb/*.pb', 'ProtobufSingle', %s)",
            f"format_schema = '{folder}/trace.proto:Req'",
        )
        ids = [f"lower(hex(sp.{name}))" for name in names[:3]]
    pairs = f"Array(Tuple(key String, value {value}))"
    trace, span, parent, start, end, at, scopes, resources = names
    spans = (
        f"Array(Tuple({trace} String, {span} String, {parent} String, name String, kind Int32, {start} UInt64, {end} UInt64,"
        f" attributes {pairs}, events Array(Tuple({at} UInt64, name String)), status Tuple(code Int32)))"
    )
    structure = f"'{resources} Array(Tuple(resource Tuple(attributes {pairs}), {scopes} Array(Tuple(spans {spans}))))'"
    table = "Map(LowCardinality(String), String)"
    return f"""INSERT INTO o.spans
      SELECT fromUnixTimestamp64Nano(toInt64(sp.{start})), {", ".join(ids)}, sp.name, sp.kind, rm['service.name'], rm,
        CAST((arrayMap(x -> x.key, sp.attributes), arrayMap(x -> {text}, sp.attributes)), '{table}'),
        sp.{end} - sp.{start}, sp.status.code, arrayMap(x -> x.{at}, sp.events), arrayMap(x -> x.name, sp.events)
      FROM (SELECT rm, arrayJoin(ss.spans) sp FROM (
        SELECT CAST((arrayMap(x -> x.key, rs.resource.attributes), arrayMap(x -> {text}, rs.resource.attributes)), '{table}') rm,
               arrayJoin(rs.{scopes}) ss
        FROM (SELECT arrayJoin({resources}) rs FROM {source % structure})))
      SETTINGS max_insert_threads = 2, max_threads = 2, {more}"""


def run_chdb(folder: Path, kind: str, target: Path) -> None:
    from chdb import session

    (folder / "trace.proto").write_text(CHDB_PROTO)
    peer = session.Session(str(target))
    peer.query("CREATE DATABASE o ENGINE = Atomic")
    peer.query(CHDB_SCHEMA)
    peer.query(chdb_insert(folder, kind))
    rows = peer.query("SELECT count(), sum(length(SpanAttributes)) FROM o.spans", "CSV").bytes()
    size = peer.query(
        "SELECT sum(bytes_on_disk) FROM system.parts WHERE active AND database = 'o'", "CSV"
    ).bytes()
    print(int(rows.split(b",")[0]), int(size))


# ---- timing ----------------------------------------------------------------------------------------


@dataclass
class Result:
    """A run and the bytes that its table takes."""

    run: Run
    bytes: int


def contest(
    folder: Path, kind: str, options: argparse.Namespace
) -> tuple[list[Result], list[Result], list[Result]]:
    """Runs on one kind of file, taken by turns: pdtrace to the table, chDB, all stages of pdtrace."""
    source = folder / {"pb": "otlp.pb", "json": "otlp.jsonl", "files": "pb"}[kind]
    us = [sys.executable, "-m", "bench.ingest", "--run"]
    target, peer = folder / "x.duckdb", folder / "chdb"
    ours: list[Result] = []
    theirs: list[Result] = []
    whole: list[Result] = []
    for number in range(options.repeat):
        target.unlink(missing_ok=True)
        done = run([*us, "table", str(source), str(target)])
        ours.append(Result(done, target.stat().st_size))
        shutil.rmtree(peer, ignore_errors=True)
        done = run([*us, "chdb", str(folder), "json" if kind == "json" else "pb", str(peer)])
        theirs.append(Result(done, int(done.output.split()[-1])))
        if number == 0 and not options.table_only:
            target.unlink()
            done = run([sys.executable, "-m", "pdtrace", "ingest", str(source), "-o", str(target)])
            whole.append(Result(done, target.stat().st_size))
    return ours, theirs, whole


def row(
    label: str, results: list[Result], spans: int, peer: list[Result] | None = None
) -> list[str]:
    def middle(found: list[Result], name: str) -> float:
        return median(getattr(result.run, name) for result in found)

    wall, cpu = middle(results, "wall_s"), middle(results, "cpu_s")
    ratios = [
        f"{middle(peer, n) / middle(results, n):.2f}" if peer else "" for n in ("wall_s", "cpu_s")
    ]
    peak = max(result.run.peak_mb for result in results)
    return [
        label, f"{wall:.2f}", f"{spans / wall:,.0f}", ratios[0], f"{cpu:.2f}", ratios[1], f"{peak:,.0f}",
        f"{results[0].bytes / spans:.1f}",
    ]  # fmt: skip


HEADER = ["", "wall s", "spans/s", "x chDB", "CPU s", "x chDB", "peak MB", "bytes/span"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spans", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--unseen", action="store_true", help="30 more attributes a span under keys never seen"
    )
    parser.add_argument(
        "--table-only", action="store_true", help="do not time the stages behind the table"
    )
    parser.add_argument(
        "--kinds", default="pb,json", help="of pb, json, files (one file a message)"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for the data; used again when it is there"
    )
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        who, *rest = options.run
        if who == "table":
            run_table(Path(rest[0]), Path(rest[1]))
        else:
            run_chdb(Path(rest[0]), rest[1], Path(rest[2]))
        return
    with tempfile.TemporaryDirectory(prefix="pdtrace-bench-") as temporary:
        folder = (options.keep or Path(temporary) / "data").resolve()
        if (folder / "spans").exists():
            spans = int((folder / "spans").read_text())
        else:
            start = time.perf_counter()
            spans = generate(folder, options.spans, unseen=options.unseen)
            (folder / "spans").write_text(str(spans))
            print(f"{spans:,} spans made in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        for kind in options.kinds.split(","):
            ours, theirs, whole = contest(folder, kind, options)
            rows = [HEADER, row("pdtrace, to the table", ours, spans, theirs)]
            rows.append(row("chDB, to the table", theirs, spans))
            if whole:
                rows.append(row("pdtrace ingest, all stages", whole, spans))
            table(f"{spans:,} spans, {kind}, median of {options.repeat}", rows)


if __name__ == "__main__":
    main()
