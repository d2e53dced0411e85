"""Attribute lists that are lifted out of OTLP/JSON before it is parsed: the rows stay the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import orjson
import polars as pl
import pytest
from otlp_made import attributes, lines, read, request, span

from pdtrace.collectors import _otlp_lines
from pdtrace.collectors._otlp_attributes import INT, LIFTED, STRING
from pdtrace.collectors._otlp_lifted import lift

TEXTS = [
    "", "plain", 'a "quoted" word', "back\\slash", "\\", '\\"', "line\nbreak", "tab\tbed", "größer 東京 🚀",
    '"}},{"key":"k","value":{"stringValue":"v"}}', '"attributes":[{"key":"', "}}]", "{", "null", "1",
]  # fmt: skip
KEYS = ["gen_ai.request.id", "", "key", "value", "a", "größe", 'with "quotes"', "x" * 40, "at"]
VALUES: list[Any] = [
    *TEXTS, 0, -1, 5, 2**63 - 1, -(2**63), 0.0, -0.5, 1e300, 3.0, True, False,
    ["stop", "length"], [], {"inner": 1, "more": {"key": "v"}}, b"\x00\xff", None,
]  # fmt: skip


def compact(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value) + b"\n"


def escaped(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def spaced(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def with_numbers(value: dict[str, Any]) -> bytes:
    """64-bit integers as JSON numbers."""

    def numbers(item: Any) -> Any:
        if isinstance(item, list):
            return [numbers(inner) for inner in item]
        if not isinstance(item, dict):
            return item
        return {k: int(v) if k == "intValue" else numbers(v) for k, v in item.items()}

    return compact(numbers(value))


def ugly(seed: int, *, regular: bool) -> list[dict[str, Any]]:
    """Requests whose attributes hold what could mislead a search for bytes."""
    draw = random.Random(seed)
    values = [v for v in VALUES if not regular or isinstance(v, str | int | float)]

    def some() -> list[dict[str, Any]]:
        picked = [(draw.choice(KEYS), draw.choice(values)) for _ in range(draw.randrange(6))]
        return [pair for key, value in picked for pair in attributes({key: value})]

    def one(number: int) -> dict[str, Any]:
        made = span(spanId=f"{seed * 1000 + number + 1:016x}", attributes=some())
        if draw.random() < 0.3:
            made["events"] = [{"timeUnixNano": "5", "name": "e", "attributes": some()}] * 2
        if draw.random() < 0.2:
            made["links"] = [{"traceId": "ab" * 16, "spanId": "cd" * 8, "attributes": some()}]
        return made

    return [
        request(*(one(10 * block + i) for i in range(10)), attributes=some()) for block in range(5)
    ]


def both(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows of spans with and without lifting."""
    lifted = read(data)
    with monkeypatch.context() as patch:
        patch.setattr(_otlp_lines, "lift", lambda _: (None, None))
        plain = read(data)
    assert lifted.frame("resources").equals(plain.frame("resources"))
    assert lifted.count == plain.count
    assert lifted.skipped == plain.skipped
    return lifted.frame(), plain.frame()


@pytest.mark.parametrize("writer", [compact, escaped, spaced, with_numbers])
@pytest.mark.parametrize("regular", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_lifting_changes_no_row(
    seed: int,
    regular: bool,
    writer: Callable[[dict[str, Any]], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"".join(map(writer, ugly(seed, regular=regular)))
    lifted, plain = both(data, monkeypatch)
    assert lifted.height == 50
    assert lifted.equals(plain)


def test_regular_lists_are_lifted_and_others_stay() -> None:
    regular = span(attributes=attributes({"model": "m", "tokens": 7}))
    array = span(spanId="1" * 16, attributes=attributes({"reasons": ["stop"], "tokens": 8}))
    rest, lifted = lift(compact(request(regular, array)))
    assert rest is not None
    assert lifted is not None
    assert lifted.keys == ["service.name", "model", "tokens"]
    assert lifted.values[STRING].to_pylist() == ["engine", "m"]
    assert lifted.values[INT].to_pylist() == [7]
    assert lifted.bounds.tolist() == [0, 1, 3]
    value = orjson.loads(bytes(rest))
    (made, other) = value["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert made == {**regular, "attributes": [{LIFTED: 10_000_001}]}
    assert other == array


@pytest.mark.parametrize(
    "line",
    [
        compact(request(span(attributes=attributes({"a": "b" + LIFTED})))),  # our own mark
        compact(request(span(attributes=attributes({"a": "b"})))).replace(b'"b"', b'"b\x01"'),
        compact(request(span(attributes=attributes({"a": 5})))).replace(b'"5"', b'"five"'),
        b"\n\n",
    ],
)
def test_what_is_not_sure_is_not_lifted(line: bytes) -> None:
    assert lift(line) == (None, None)


@pytest.mark.parametrize(
    "pair",
    [
        b'{"key":"a","value":{"stringValue":"x","intValue":"1"}}',
        b'{"key":"a","value":{"stringValue":"x"},"more":1}',
        b'{"key":"a","value":{"stringValue":null}}',
        b'{"key":"a","value":{"doubleValue":"NaN"}}',
        b'{"key":"a","value":{"boolValue":tru}}',
        b'{"key":"a","value":{"intValue":1.0}}',
        b'{"key":"a","value":{"stringValue":"\xff"}}',
        b'{"key":"a","value":{"stringValue":"\\ud800"}}',
        b'{"key":"a","value":{"stringValue":"\\x"}}',
        b'{"key":"a","value":{"doubleValue":1e5}}}',
        b'{"value":{"stringValue":"x"},"key":"a"}',
        b'{"key":"a","value":{"stringValue":"x"}',
        b'{"key":"a","value":{"stringValue":"x',
    ],
)
def test_odd_pairs_are_read_as_without_lifting(
    pair: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = compact(request(span(attributes=attributes({"n": 1}))))
    odd = good.replace(b'{"key":"n","value":{"intValue":"1"}}', pair)
    lifted, plain = both(good + odd + good, monkeypatch)
    assert lifted.equals(plain)
    lifted, plain = both(good + odd[: odd.index(pair) + len(pair)], monkeypatch)
    assert lifted.equals(plain)


def test_lines_with_and_without_blanks_are_lifted() -> None:
    value = request(span(attributes=attributes({"a": "b", "n": 5, "d": 0.5, "t": True})))
    for line in (compact(value), lines(value), with_numbers(value)):
        rest, lifted = lift(line)
        assert rest is not None
        assert lifted is not None
        assert lifted.keys == ["service.name", "a", "n", "d", "t"]
        assert b"key" not in bytes(rest)
    assert lift(json.dumps(value, indent=1).encode())[0] is None
