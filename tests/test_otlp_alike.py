"""Spans of OTLP/JSON that are found by the way others are written: the rows stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import orjson
import polars as pl
import pytest
from otlp_made import Rows, attributes, read, request, span
from test_otlp_lifted import KEYS, VALUES, compact, escaped, spaced, with_numbers

from pdtrace.collectors import _otlp_alike, _otlp_lines
from pdtrace.collectors._otlp_alike import Patterns
from pdtrace.collectors._otlp_rest import Rest, rests


@pytest.fixture(autouse=True)
def _few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_otlp_alike, "LEAST_SPANS", 1)
    monkeypatch.setattr(_otlp_alike, "LEAST_ALIKE", 1)
    monkeypatch.setattr(_otlp_alike, "LEAST_SAMPLE", 3)


def both(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[Rows, pl.DataFrame]:
    """What is read with patterns, and the rows without: all else must be the same."""
    found = read(data)
    with monkeypatch.context() as patch:
        patch.setattr(_otlp_lines, "rests", lambda text, _: [Rest(text)])
        plain = read(data)
    assert found.frame("resources").equals(plain.frame("resources"))
    assert (found.count, found.skipped, found.facts) == (plain.count, plain.skipped, plain.facts)
    return found, plain.frame()


def taken(data: bytes) -> int:
    """How many spans are found without parsing."""
    for rest in rests(data, Patterns()):
        if rest.runs is not None:
            return int(rest.runs.sum())
    return 0


def alike(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Spans that differ in their ids, names and numbers only."""
    return [
        span(
            spanId=f"{n + 1:016x}",
            name=f"work {n % 3}",
            startTimeUnixNano=str(10**18 + n),
            attributes=attributes({"text": "x" * (n % 70), "n": n, "share": n / 7, "on": n > 3}),
            **fields,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("writer", [compact, escaped, spaced, with_numbers])
@pytest.mark.parametrize("seed", range(3))
def test_patterns_change_no_row(
    seed: int, writer: Callable[[dict[str, Any]], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)

    def some(keys: list[str]) -> list[dict[str, Any]]:
        return [pair for key in keys for pair in attributes({key: draw.choice(VALUES)})]

    def one(number: int) -> dict[str, Any]:
        made = span(
            spanId=f"{number + 1:016x}", attributes=some(draw.choice([KEYS[:3], KEYS[2:5]]))
        )
        made["kind"] = draw.choice([2, 3, "SPAN_KIND_CLIENT"])
        made["status"] = draw.choice([{}, {"code": 2, "message": draw.choice(VALUES[:8])}])
        if draw.random() < 0.4:
            made["events"] = [{"timeUnixNano": "5", "name": "é", "attributes": some(["a"])}] * 2
        if draw.random() < 0.2:
            made["links"] = [{"traceId": "ab" * 16, "spanId": "cd" * 8, "attributes": some(["b"])}]
        if draw.random() < 0.1:
            made["unheard"] = {"of": [1, "two"]}
        if draw.random() < 0.1:
            made["droppedAttributesCount"] = draw.choice([0, 3])
        return made

    requests = [
        request(*(one(20 * line + n) for n in range(20)), attributes=some(["service.name"]))
        for line in range(6)
    ]
    data = b"".join(map(writer, requests))
    found, plain = both(data, monkeypatch)
    assert found.frame().height == 120
    assert found.frame().equals(plain)


def test_alike_spans_are_taken_out_and_the_others_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = span(spanId="f" * 16, attributes=attributes({"list": [1, "two"], "only": "here"}))
    unheard = span(spanId="e" * 16, unheard=1)
    spans = [*alike(30), odd, unheard, *alike(60)[30:]]
    data = compact(request(*spans[:40])) + compact(request(*spans[40:]))
    monkeypatch.setattr(_otlp_alike, "LEAST_ALIKE", 5)
    assert taken(data) == 60
    found, plain = both(data, monkeypatch)
    assert found.frame().equals(plain)
    assert found.frame()["record"].to_list() == list(range(62))


@pytest.mark.parametrize("writer", [compact, escaped, spaced, with_numbers])
def test_every_way_of_writing_is_matched(
    writer: Callable[[dict[str, Any]], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [{"timeUnixNano": "7", "name": "first", "attributes": attributes({"at": 1})}]
    links = [{"traceId": "ab" * 16, "spanId": "cd" * 8}]
    spans = alike(50, events=events, links=links, status={"code": 1}, flags=257)
    data = writer(request(*spans))
    assert taken(data) == 50
    found, plain = both(data, monkeypatch)
    assert found.frame().equals(plain)


def test_values_that_most_spans_share_may_differ_in_some(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [
        {**made, "attributes": attributes({"model": "m" * (1 + (n == 70)), "n": 5 + (n == 80)})}
        for n, made in enumerate(alike(100))
    ]
    data = compact(request(*spans))
    assert taken(data) == 100
    found, plain = both(data, monkeypatch)
    assert found.frame().equals(plain)
    assert [v[0] for v in found.frame()["int_values"].to_list()] == [5] * 80 + [6] + [5] * 19


def test_a_key_that_comes_twice_and_one_with_the_separator(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [attributes({key: n})[0] for n, key in enumerate(("a", "b", "a", "sep\x1farator"))]
    spans = [{**made, "attributes": pairs} for made in alike(20)]
    data = compact(request(*spans))
    assert taken(data) == 20
    found, plain = both(data, monkeypatch)
    assert found.frame().equals(plain)
    assert found.frame()["extra"][0] == '{"attributes":[["a",2],["sep\\u001farator",3]]}'


def test_content_is_withheld_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [
        {**made, "attributes": attributes({"gen_ai.prompt": f"secret {n}", "long": "y" * 5000})}
        for n, made in enumerate(alike(20))
    ]
    lines = [request(made, resource={"service.name": "s", "prompt": "secret"}) for made in spans]
    data = b"".join(map(compact, lines))
    assert taken(data) == 20
    found, plain = both(data, monkeypatch)
    assert found.frame().equals(plain)
    assert "secret" not in str(found.frame().to_dicts())
    assert found.facts == {"content_withheld": 60}


def test_lines_with_their_own_resources_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        request(
            *([made] * (1 + n % 2)), resource={"service.name": f"service {n % 3}"}, name=f"{n % 2}"
        )
        for n, made in enumerate(alike(60))
    ]
    data = b"\n".join(map(compact, lines)) + b"\n"
    (first, *_) = rests(data, Patterns())
    assert first.lines is not None
    assert len(orjson.loads(b"[" + first.text.replace(b"\n", b",")[:-1] + b"]")) == 6
    found, plain = both(data, monkeypatch)
    assert found.frame().equals(plain)


def test_two_requests_in_a_line_keep_their_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(service: str, *numbers: int) -> bytes:
        made = request(resource={"service.name": service})
        made["resourceSpans"][0]["scopeSpans"] = [
            {"scope": {"name": service}, "spans": [span(spanId=f"{n:016x}")]} for n in numbers
        ]
        return compact(made).strip()

    two, one = line("a", 1) + line("b", 2, 3, 4), line("c", 5)
    # As many spans as if each request stood on its own line.
    data = b"\n".join([two, one, two, one, one]) + b"\n"
    assert taken(data) == 11
    found, plain = both(data, monkeypatch)
    assert found.frame().equals(plain)
    assert "".join(found.frame().sort("record")["scope_name"]) == "abbbcabbbcc"


@pytest.mark.parametrize(
    "pair",
    [
        b'{"key":"n","value":{"intValue":"five"}}',
        b'{"key":"n","value":{"intValue":"99999999999999999999"}}',
        b'{"key":"n","value":{"intValue":5}}',
        b'{"key":"n","value":{"intValue":"5"},"more":1}',
        b'{"key":"n","value":{"intValue":null}}',
        b'{"key":"n","value":{"intValue":"5","intValue":"6"}}',
        b'{"key":"n","value":{"stringValue":"5"}}',
        b'{"key":"n","value":{"stringValue":"\\ud800"}}',
        b'{"key":"n","value":{"stringValue":"\xff"}}',
        b'{"key":"n","value":{"stringValue":"\x01"}}',
        b'{"key":"n","value":{"stringValue":"\\"}},{\\""}}',
        b'{"key":"n","value":{"doubleValue":"NaN"}}',
        b'{"key":"n","value":{"doubleValue":1e400}}',
        b'{"key":"n","value":{"boolValue":"true"}}',
        b'{"key":"n","value":{"arrayValue":{"values":[{"doubleValue":tru}]}}}',
        b'{"key":"n","value":{"kvlistValue":{"values":[{"key":"k","value":{"intValue":"1"}}]}}}',
        b'{"key":"n","value":{"bytesValue":"AP8="}}',
        b'{"key":"n","value":{}}',
        b'{"key":"n","value":{"arrayValue":' + b"[" * 3000 + b"]" * 3000 + b"}}",
        b'{"value":{"intValue":"5"},"key":"n"}',
        b'{"key":"n","value":{"intValue":"5"}',
        b'{"key":"\\u006e","value":{"intValue":"5"}}',
        b'{"key":"n","value":{"intValue":"5"}},{"~":0}',
    ],
)
@pytest.mark.parametrize("everywhere", [True, False])
def test_odd_pairs_are_read_as_without_patterns(
    pair: bytes, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = [span(spanId=f"{n + 1:016x}", attributes=attributes({"n": n})) for n in range(30)]
    regular = [compact(request(*spans[k : k + 10])) for k in (0, 10, 20)]
    usual = b'{"key":"n","value":{"intValue":"%d"}}'
    numbers = range(30) if everywhere else (15,)
    data = b"".join(regular)
    for n in numbers:
        data = data.replace(usual % n, pair)
    found, plain = both(data, monkeypatch)
    assert found.frame().equals(plain)
    if not everywhere:
        found, plain = both(data[: data.index(pair) + len(pair)], monkeypatch)
        assert found.frame().equals(plain)


def test_a_number_as_the_last_of_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [{**made, "flags": 100 + n} for n, made in enumerate(alike(30))]
    for made in spans:
        del made["attributes"]
    data = compact(request(*spans)) + compact(request(*spans))
    assert taken(data) == 60
    found, plain = both(data, monkeypatch)
    assert found.frame().equals(plain)
    assert found.frame()["flags"].to_list() == [100 + n for n in range(30)] * 2


def test_few_spans_are_left_to_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_otlp_alike, "LEAST_SPANS", 1000)
    assert taken(compact(request(*alike(50)))) == 0
    assert taken(compact({"resourceLogs": []}) * 50) == 0
