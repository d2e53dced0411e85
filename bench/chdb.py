"""The peer: chDB (ClickHouse in process) reads the same OTLP files into the table of OpenTelemetry's exporter."""

from __future__ import annotations

from pathlib import Path

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
