"""OTLP that is cut, broken, random or no OTLP: what is whole is kept, nothing is claimed, nothing raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from otlp_made import LOGS, ONE, attributes, framed, lines, message, read, request, span, survive

from pdtrace.collectors import otlp
from pdtrace.model import Head


@pytest.mark.parametrize("pretty", [False, True])
def test_a_cut_json_file_keeps_the_whole_spans(pretty: bool) -> None:
    three = request(*[span(spanId=f"{i:016x}", attributes=attributes({"i": i})) for i in (1, 2, 3)])
    whole = request(span(spanId="ff" * 8))
    text = json.dumps(three, indent=2 if pretty else None)
    cut = text[: text.rindex('"intValue"')].encode()
    out = read(cut if pretty else lines(whole) + cut)
    assert [r for _, r in out.skipped] == ["cut off at the end of the file"]
    assert out.frame().height == (2 if pretty else 3)
    assert out.count == out.frame().height + 1
    assert [record for record, _ in out.skipped] == [out.count - 1]


def test_a_cut_protobuf_file_keeps_the_whole_spans() -> None:
    three = request(*[span(spanId=f"{i:016x}") for i in (1, 2, 3)])
    whole = request(span(spanId="ff" * 8))
    for data, expected in ((framed(whole, three)[:-9], 3), (message(three)[:-9], 2)):
        out = read(data)
        assert out.frame().height == expected
        assert [r for _, r in out.skipped] == ["cut off at the end of the file"]
        assert out.count == expected + 1


def test_a_broken_line_between_good_ones_is_skipped() -> None:
    out = read(
        lines(request(span()))
        + b'{"resourceSpans": [oops]}\n\n"text"\n{"other": 1}\n'
        + lines(request(span(spanId="02" * 8)))
    )
    assert out.frame().height == 2
    assert sorted(reason for _, reason in out.skipped) == [
        "JSON, but no OTLP export request",
        "JSON, but not an object",
        "not JSON",
    ]
    assert out.count == 5


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"{}\n", b"[]", b'{"resourceSpans": []}', b'{"resourceSpans": null}\n']
)
def test_files_without_a_span_give_nothing(data: bytes) -> None:
    out = read(data)
    assert out.frame().height == 0
    assert out.count == 0


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_never_claimed_and_never_raise(data: bytes) -> None:
    assert otlp.sniff(Head("x", "x", data, complete=True)) is None
    survive(data)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 255), st.sampled_from(["json", "framed", "bare"]))
@example(230663121, 0, "bare")  # ptars reads it, Google's protobuf does not
def test_a_flipped_byte_or_a_cut_never_raises(place: int, byte: int, kind: str) -> None:
    whole = {"json": lines(ONE, ONE), "framed": framed(ONE, LOGS), "bare": message(ONE)}[kind]
    at = place % len(whole)
    survive(whole[:at] + bytes([byte]) + whole[at + 1 :])
    survive(whole[:at])
    otlp.sniff(Head("x", "x", whole[:at], complete=False))


@pytest.mark.parametrize(
    "text",
    ['{"resourceSpans": 1}', '{"results": []}', '{"a": "resourceSpans"}', "plain text", '{"traceEvents": []}', '[{"traceId": "1", "id": "2", "name": "zipkin"}]', '{"data": [{"traceID": "1", "spans": []}]}'],
)  # fmt: skip
def test_other_json_is_not_claimed(text: str) -> None:
    assert otlp.sniff(Head("x", "x", text.encode(), complete=True)) is None
