"""OTLP in all its spellings gives the same rows, loses nothing but content, and survives damage."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1 import trace_pb2
from otlp_made import (
    END,
    FIXTURES,
    ONE,
    PARENT,
    SPAN,
    START,
    TRACE,
    Rows,
    attributes,
    framed,
    lines,
    message,
    numbers,
    read,
    request,
    snake,
    span,
)

from pdtrace.collectors import _otlp_decoders, _otlp_json, _otlp_wire, otlp
from pdtrace.collectors._common import rfc3339_to_ns
from pdtrace.model import Head


def check_one(out: Rows) -> None:
    rows = out.frame().sort("record")
    assert out.units == ["span"]
    assert out.count == 2
    assert out.skipped == []
    first, second = rows.rows(named=True)
    assert (first["trace_id"], first["span_id"], first["parent_span_id"]) == (TRACE, SPAN, PARENT)
    assert (first["start_ns"], first["end_ns"]) == (START, END)
    assert (first["kind"], first["status_code"], first["status_message"]) == (
        "server",
        "error",
        "timed out",
    )
    assert (first["trace_state"], first["flags"], first["scope_name"], first["scope_version"]) == (
        "a=b",
        257,
        "lib",
        "2",
    )
    assert first["events"] == [
        {"time_ns": START + 5, "name": "first_token", "attributes": '{"n":1,"t":"x\\"y","f":1.0}'},
        {"time_ns": START + 9, "name": "finish", "attributes": None},
    ]
    assert first["links"] == [
        {"trace_id": "ab" * 16, "span_id": "cd" * 8, "attributes": '{"why":"retry"}'}
    ]
    assert json.loads(first["extra"]) == {
        "droppedEventsCount": 3,
        "events": {"1": {"droppedAttributesCount": 2}},
        "links": {"0": {"flags": 256, "traceState": "k=v"}},
        "scope": {"attributes": {"scope attribute": 1}},
    }
    assert (second["parent_span_id"], second["end_ns"], second["kind"], second["status_code"]) == (
        None,
        None,
        "unspecified",
        "unset",
    )
    assert second["string_keys"] is None
    assert second["events"] is None
    assert second["resolution_ns"] == 1
    assert out.attribute("text") == ['héllo "q"\n', None]
    assert out.attribute("empty text") == ["", None]
    assert out.attribute("whole", int) == [-7, None]
    assert out.attribute("big", int) == [2**62, None]
    assert out.attribute("real", float) == [0.1, None]
    assert out.attribute("whole real", int) == [3, None]
    assert out.attribute("yes", bool) == [True, None]
    assert out.attribute("no", bool) == [False, None]
    assert out.attribute("whole real") == ["3.0", None]
    others = {
        key: out.attribute(key)[0]
        for key in ("list", "mixed", "nested", "map", "raw", "nothing", "empty list", "empty map")
    }
    assert others == {
        "list": '["stop","length"]', "mixed": '["a",1,2.5,false]', "nested": '[[1,2],{"a":[null]}]', "map": '{"b":1,"a":{"c":"d"}}',
        "raw": '{"bytesValue":"AP8="}', "nothing": "null", "empty list": "[]", "empty map": "{}",
    }  # fmt: skip
    (resource,) = out.frame("resources").rows(named=True)
    assert resource["service_name"] == "engine"
    assert first["resource"] == second["resource"] == resource["resource"]


def base64_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: base64.b64encode(bytes.fromhex(v)).decode()
            if k in ("traceId", "spanId", "parentSpanId")
            else base64_ids(v)
            for k, v in value.items()
        }
    return [base64_ids(v) for v in value] if isinstance(value, list) else value


SPELLINGS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "lines": lambda r: lines(r),
    "line without newline": lambda r: json.dumps(r).encode(),
    "compact line": lambda r: json.dumps(r, separators=(",", ":")).encode() + b"\n",
    "pretty": lambda r: json.dumps(r, indent=2).encode(),
    "array": lambda r: json.dumps([r]).encode(),
    "pretty array": lambda r: json.dumps([r], indent=1).encode(),
    "snake case": lambda r: lines(snake(r)),
    "numbers and names": lambda r: lines(numbers(r)),
    "base64 ids": lambda r: lines(base64_ids(r)),
    "protobuf": message,
    "framed protobuf": framed,
    "byte order mark": lambda r: b"\xef\xbb\xbf" + lines(r),
    "framed zstd": lambda r: _zstd(message(r)),
    "framed zstd json": lambda r: _zstd(json.dumps(r).encode()),
}  # fmt: skip


def _zstd(data: bytes) -> bytes:
    import zstandard

    packed = zstandard.ZstdCompressor().compress(data)
    return struct.pack(">I", len(packed)) + packed


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_known_rows(spelling: str) -> None:
    check_one(read(SPELLINGS[spelling](ONE)))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_recognised(spelling: str) -> None:
    data = SPELLINGS[spelling](ONE)
    match = otlp.sniff(Head("x", "x", data, complete=True))
    assert match is not None
    assert match.strength == "exact"


def test_googles_protobuf_gives_what_ptars_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ptars")
    fast = read(framed(ONE)).frame()
    monkeypatch.setattr(_otlp_decoders, "_ptars_handler", lambda: None)
    slow = read(framed(ONE))
    check_one(slow)
    assert slow.frame().equals(fast)


def test_the_walk_gives_what_pyarrow_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = request(
        span(
            attributes=attributes({"a": "b", "n": 1, "f": 2.0, "ok": True, "l": ["x", 1]}),
            status={"code": 1},
        )
    )
    assert _otlp_json.resource_spans(lines(plain), _otlp_json.spelling_of(lines(plain))) is not None
    fast = read(lines(plain)).frame()
    monkeypatch.setattr(_otlp_json, "resource_spans", lambda *_, **__: None)
    assert read(lines(plain)).frame().equals(fast)


def test_fields_that_otlp_does_not_know_are_kept() -> None:
    out = read(lines(request(span(acmeField={"x": [1]}, attributes=attributes({"a": 1})))))
    assert json.loads(out.frame()["extra"][0]) == {"acmeField": {"x": [1]}}
    assert out.attribute("a", int) == [1]


def with_unknown_fields(data: bytes) -> bytes:
    """A request whose first span has fields 99 (5) and 100 ("text")."""
    traces = trace_pb2.TracesData.FromString(data)
    one = traces.resource_spans[0].scope_spans[0].spans[0]
    one.MergeFromString(b"\x98\x06\x05" + b"\xa2\x06\x04text")
    return traces.SerializeToString()


def test_protobuf_fields_that_otlp_does_not_know_are_kept() -> None:
    plain = read(message(ONE))
    out = read(with_unknown_fields(message(ONE)))
    (extra,) = out.store.rows("SELECT extra FROM spans")[0]
    kept = json.loads(extra)
    assert kept.pop("field99") == 5
    assert kept.pop("field100") == base64.b64encode(b"text").decode()
    assert kept == json.loads(plain.store.rows("SELECT extra FROM spans")[0][0] or "{}")
    columns = "* EXCLUDE (extra)"
    assert out.frame(columns=columns).equals(plain.frame(columns=columns))


def test_defaults_that_are_written_out_are_no_unknown_fields() -> None:
    values = [{"stringValue": ""}, {"intValue": "0"}, {"doubleValue": 0.0}, {"boolValue": False}]
    values += [{"intValue": "-1"}, {"intValue": str(2**63 - 1)}, {"stringValue": "x" * 200}]
    pairs = [{"key": f"k{i}", "value": value} for i, value in enumerate(values)]
    data = message(request(span(attributes=[*pairs, *attributes({"l": [1], "m": {"a": 2}})])))
    arrow = _otlp_decoders.resource_spans([data])
    assert arrow is not None
    assert _otlp_decoders._total_bytes(arrow) == len(data)
    traces = trace_pb2.TracesData.FromString(data)
    # droppedEventsCount: 0
    one = traces.resource_spans[0].scope_spans[0].spans[0].SerializeToString() + b"\x60\x00"
    scope = b"\x12" + _otlp_wire._encoded(len(one)) + one
    group = b"\x12" + _otlp_wire._encoded(len(scope)) + scope
    odd = b"\x0a" + _otlp_wire._encoded(len(group)) + group
    arrow = _otlp_decoders.resource_spans([odd])
    assert arrow is not None
    assert _otlp_decoders._total_bytes(arrow) < len(odd)


def test_missing_ids_are_unknown_and_large_ids_stay_text() -> None:
    bare = {
        "name": "x",
        "attributes": [
            {"key": "worker", "value": {"intValue": "16004647803649141590"}},
            {"key": "n", "value": {"stringValue": " 42 "}},
        ],
    }
    out = read(lines(request(bare)))
    row = out.frame().row(0, named=True)
    assert [row[k] for k in ("trace_id", "span_id", "parent_span_id", "start_ns", "end_ns")] == [
        None
    ] * 5
    assert out.attribute("worker") == ["16004647803649141590"]
    assert out.attribute("worker", int) == [None]
    assert out.attribute("n", int) == [42]
    assert out.attribute("absent") == [None]


def test_a_key_that_comes_twice_keeps_its_first_value_and_the_other_in_extra() -> None:
    twice = [
        {"key": "a", "value": {"stringValue": "1"}},
        {"key": "a", "value": {"stringValue": "2"}},
        {"key": "b\x1fc", "value": {"intValue": "3"}},
    ]
    for data in (lines(request(span(attributes=twice))), framed(request(span(attributes=twice)))):
        out = read(data)
        assert out.attribute("a") == ["1"]
        assert json.loads(out.frame()["extra"][0]) == {"attributes": [["a", "2"], ["b\x1fc", 3]]}


def test_content_becomes_length_and_hash_unless_asked_for() -> None:
    prompt, long = "Tell me a secret", "z" * 5000
    body = request(
        span(
            attributes=attributes(
                {
                    "gen_ai.prompt": prompt, "gen_ai.prompt.0.content": prompt, "gen_ai.prompt.0.role": "user", "unknown": long,
                    "gen_ai.input.messages": [{"role": "user", "content": prompt}], "gen_ai.usage.input_tokens": 4, "exception.stacktrace": long,
                }
            ),
            events=[{"timeUnixNano": "1", "name": "gen_ai.content.prompt", "attributes": attributes({"gen_ai.event.content": prompt})}],
        )
    )  # fmt: skip
    stand_in = json.dumps(
        {"length": 16, "sha256": hashlib.sha256(prompt.encode()).hexdigest()}, separators=(",", ":")
    )
    for data in (lines(body), framed(body)):
        out = read(data)
        everything = str(out.frame().rows()) + str(out.frame("resources").rows())
        assert prompt not in everything
        assert long not in everything
        assert out.attribute("gen_ai.prompt.0.content") == [stand_in]
        assert out.attribute("gen_ai.prompt.0.role") == ["user"]
        assert json.loads(out.attribute("unknown")[0])["length"] == 5000
        assert json.loads(out.attribute("exception.stacktrace")[0])["length"] == 5000
        assert out.attribute("gen_ai.usage.input_tokens", int) == [4]
        assert out.facts == {"content_withheld": 6}
        kept = read(data, keep_content=True)
        assert kept.attribute("gen_ai.prompt") == [prompt]
        assert kept.attribute("unknown") == [long]
        assert kept.facts == {}


def test_what_an_error_says_may_quote_the_prompt_and_is_not_kept() -> None:
    prompt = "Tell me a secret"
    body = request(
        span(
            status={"code": 2, "message": f"bad prompt: {prompt}"},
            attributes=attributes({"error.message": prompt, "error.type": "BadRequestError"}),
            events=[{"timeUnixNano": "1", "name": "exception", "attributes": attributes({
                "exception.message": prompt, "exception.stacktrace": f"Traceback\nValueError: {prompt}", "exception.type": "ValueError",
            })}],
        ),
        span(spanId="00" * 7 + "09", status={"code": 2, "message": "deadline exceeded"}),
    )  # fmt: skip
    for data in (lines(body), framed(body)):
        out = read(data)
        everything = str(out.frame().rows())
        assert prompt not in everything
        assert "ValueError" in everything
        assert out.attribute("error.type")[0] == "BadRequestError"
        assert "deadline exceeded" in out.frame()["status_message"].to_list()
        assert out.facts == {"content_withheld": 4}
        assert prompt in str(read(data, keep_content=True).frame().rows())


def test_many_blocks_keep_the_order_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_otlp_json, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(otlp, "GROUP_BYTES", 500)
    many = [
        request(span(spanId=f"{i + 1:016x}", startTimeUnixNano=str(START + i))) for i in range(50)
    ]
    for data in (
        lines(*many),
        framed(*many),
        message({"resourceSpans": [r["resourceSpans"][0] for r in many]}),
    ):
        frame = read(data).frame("spans").sort("record")
        assert frame["record"].to_list() == list(range(50))
        assert frame["start_ns"].to_list() == [START + i for i in range(50)]


def test_the_two_fixtures_of_one_capture_give_the_same_rows() -> None:
    one, two = (read((FIXTURES / f"vllm_pd.{kind}").read_bytes()) for kind in ("pb", "jsonl"))
    assert one.frame().height == 21
    assert one.frame().equals(two.frame())
    assert one.frame("resources").equals(two.frame("resources"))
    logs, same = (read((FIXTURES / f"dynamo_logs.{kind}").read_bytes()) for kind in ("pb", "jsonl"))
    assert logs.logs
    assert logs.logs == same.logs


@pytest.mark.shared
@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ("vllm/agg/vllm.traces.otlp.bin.gz", "vllm/agg/vllm.traces.otlp.jsonl.gz", 374),
        ("vllm/pd_nixl/pd.traces.otlp.bin.gz", "vllm/pd_nixl/pd.traces.otlp.jsonl.gz", 1556),
        ("dynamo/agg/otlp_traces.pb.gz", "dynamo/agg/otlp_traces.jsonl.gz", 2202),
        (
            "dynamo/disagg_bootstrap/otlp_traces.pb.gz",
            "dynamo/disagg_bootstrap/otlp_traces.jsonl.gz",
            None,
        ),
        ("dynamo/agg/otlp_logs.pb.gz", "dynamo/agg/otlp_logs.jsonl.gz", 3948),
    ],
)
def test_captures_in_both_formats_give_the_same_rows(
    shared: Path, first: str, second: str, count: int | None
) -> None:
    one, two = (
        read(gzip.decompress((shared / "data" / name).read_bytes())) for name in (first, second)
    )
    assert one.count == two.count
    assert count is None or one.count == count
    assert one.skipped == two.skipped == []
    assert one.frame().equals(two.frame())
    assert one.logs == two.logs


def test_kinds_and_codes_that_are_no_enum_stay_as_text() -> None:
    odd = ["²", "9" * 5000, "-1", "٣"]
    spans = [
        span(spanId=f"{n + 1:016x}", kind=text, status={"code": text})
        for n, text in enumerate([*odd, "3"])
    ]
    found = read(json.dumps(request(*spans)).encode()).frame().sort("record")
    assert found["kind"].to_list() == [*odd[:3], "client", "client"]
    assert found["status_code"].to_list() == [*odd[:3], "٣", "3"]


def test_an_instant_with_a_raised_digit_is_none() -> None:
    assert rfc3339_to_ns("2026-01-01T00:00:00.²Z") is None
    assert rfc3339_to_ns("2026-01-01T00:00:00.5Z") == 1767225600500000000
