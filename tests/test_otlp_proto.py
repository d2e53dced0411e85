"""Spans of OTLP protobuf that are read many at a time: the rows stay the same."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from otlp_made import (
    EVERY_TYPE,
    FIXTURES,
    ONE,
    Bytes,
    attributes,
    framed,
    message,
    request,
    span,
)

from pdtrace.collectors import _otlp_proto, _otlp_proto_walk, otlp
from pdtrace.collectors._otlp_ahead import in_order
from pdtrace.collectors._otlp_proto_steps import Wire
from pdtrace.collectors._otlp_proto_walk import Steps, outline


@pytest.fixture(autouse=True)
def _few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_otlp_proto, "LEAST_SPANS", 1)
    monkeypatch.setattr(_otlp_proto, "LEAST_OF_SCOPE", 0)
    monkeypatch.setattr(_otlp_proto_walk, "LEAST_ALIKE", 1)


class Kept:
    """A sink that keeps rows as they are handed over."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.told: list[Any] = []

    def add(self, table: str, batch: Any, **_: Any) -> None:
        rows = self.rows.setdefault(table, [])
        for row in batch.to_pylist():
            rows.append({key: value for key, value in row.items() if value is not None})

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: self.told.append((name, given))


def kept(data: bytes, **options: Any) -> Kept:
    out = Kept()
    otlp.read(Bytes(data, **options), out)  # type: ignore[arg-type]
    return out


def same(data: bytes, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Kept:
    """What is read; all must be as it is without steps."""
    found = kept(data, **options)
    with monkeypatch.context() as patch:
        patch.setattr(_otlp_proto, "_alike", lambda *_: None)
        plain = kept(data, **options)
    assert found.rows == plain.rows
    assert found.told == plain.told
    return found


def taken(*messages: bytes) -> list[bool]:
    """Which spans are read by steps."""
    wire = Wire(list(messages))
    found = outline(list(messages), wire)
    assert found is not None
    last, _ = Steps().walk(wire, found.starts, found.ends)
    return [bool(place >= 0) for place in last]


# ---- messages by hand ----------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def block(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def of_spans(*spans: bytes) -> bytes:
    """A request with these spans."""
    return block(1, block(2, b"".join(block(2, one) for one in spans)))


IDS = block(1, b"\xab" * 16) + block(2, b"\x01" * 8)
TIMES = struct.pack("<BQBQ", 0x39, 10**18, 0x41, 10**18 + 5)
PLAIN = IDS + block(5, b"work") + b"\x30\x02" + TIMES


def pair(key: bytes, value: bytes) -> bytes:
    return block(9, block(1, key) + block(2, value))


USUAL = {
    "a number of nine bytes": PLAIN + pair(b"at_ns", b"\x18" + varint(10**18)),
    "a negative number": PLAIN + pair(b"n", b"\x18" + varint(2**64 - 7)),
    "the greatest": PLAIN + pair(b"n", b"\x18" + varint(2**63 - 1)),
    "eight bytes": PLAIN + pair(b"n", b"\x18" + varint(2**56 - 1)),
    "a long text": PLAIN + pair(b"t", block(1, b"x" * 300)),
    "a very long text": PLAIN + pair(b"t", block(1, b"word " * 5000)),
    "an empty text": PLAIN + pair(b"t", block(1, b"")),
    "a status without anything": PLAIN + block(15, b""),
    "zeros written out": PLAIN + b"\x50\x00" + b"\x85\x01" + bytes(4),
    "fields in another order": TIMES + block(5, b"work") + IDS,
    "no field at all": b"",
    "the same key twice": PLAIN + 2 * pair(b"t", block(1, b"x")),
    "a key with the separator": PLAIN + pair(b"a\x1fb", block(1, b"x")),
    "a list": PLAIN + pair(b"l", block(5, block(1, block(1, b"stop")))),
    "bytes": PLAIN + pair(b"b", block(7, b"\x00\xff")),
    "no list in a list": PLAIN + pair(b"l", block(5, b"\xff")),
    "a text that is no UTF-8": PLAIN + pair(b"t", block(1, b"\xff")),
    "prompt text": PLAIN + pair(b"gen_ai.prompt", block(1, b"secret")),
}  # fmt: skip
UNUSUAL = {
    "a field nobody knows": PLAIN + block(99, b"new"),
    "a field nobody knows in an attribute": PLAIN + block(9, block(1, b"k") + b"\x38\x05"),
    "a field nobody knows in a value": PLAIN + pair(b"k", b"\x48\x05"),
    "a name twice": PLAIN + block(5, b"other"),
    "a status twice": PLAIN + block(15, b"\x18\x01") + block(15, block(2, b"why")),
    "a value before its key": PLAIN + block(9, block(2, block(1, b"v")) + block(1, b"k")),
    "a key without a value": PLAIN + block(9, block(1, b"k")),
    "a value without a key": PLAIN + block(9, block(2, block(1, b"v"))),
    "an empty value": PLAIN + pair(b"k", b""),
    "two values": PLAIN + pair(b"k", block(1, b"v") + b"\x18\x05"),
    "a flag of two": PLAIN + pair(b"k", b"\x10\x02"),
    "a kind below zero": IDS + TIMES + b"\x30" + varint(2**64 - 1),
    "a number longer than need be": PLAIN + pair(b"n", b"\x18\x85\x00"),
    "a length longer than need be": PLAIN + block(9, b"\x0a\x81\x00k" + block(2, block(1, b"v"))),
    "a wrong wire type": PLAIN + b"\x2d" + bytes(4),
    "an attribute cut off": PLAIN + b"\x4a\x20\x0a\x01k",
    "bytes cut off": PLAIN + b"\x39\x00",
}  # fmt: skip


@pytest.mark.parametrize("name", [*USUAL, *UNUSUAL])
def test_a_span_among_others_gives_the_rows_that_it_gave(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {**USUAL, **UNUSUAL}[name]
    data = of_spans(PLAIN, one, PLAIN + pair(b"t", block(1, b"y")), one)
    assert taken(data) == [True, name in USUAL, True, name in USUAL]
    same(struct.pack(">I", len(data)) + data, monkeypatch)
    same(data, monkeypatch, keep_content=True)


def test_every_kind_of_value_event_and_link(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [
        request(
            *(span(spanId=f"{n + 1:016x}", attributes=attributes({"n": n, **EVERY_TYPE}), events=[
                {"timeUnixNano": str(10**18 + i), "name": f"e{i}", "attributes": attributes({"i": i * "x"})}
                for i in range(n % 3)
            ]) for n in range(9)),
            resource={"service.name": f"s{part}"},
        )
        for part in range(3)
    ]  # fmt: skip
    found = same(framed(ONE, *many, ONE), monkeypatch)
    assert len(found.rows["spans"]) == 31
    assert not any(taken(message(many[0])))  # an empty value is left to the general way
    plain = {key: value for key, value in EVERY_TYPE.items() if value is not None}
    assert all(taken(message(request(span(attributes=attributes(plain))))))


def test_fields_of_requests_that_are_unusual_stay_for_the_general_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = block(2, PLAIN) + block(2, PLAIN + pair(b"t", block(1, b"y")))
    scope = block(1, block(1, b"lib")) + spans + block(3, b"https://schema")
    whole = block(1, block(1, pair(b"", b"")[2:]) + block(2, scope) + block(3, b"https://other"))
    for data in (
        whole,
        whole + block(1, block(2, scope + block(77, b"new"))),
        whole + block(1, block(55, b"new") + block(2, scope)),
        whole + block(44, b"new"),
        block(1, b"") + whole,
    ):
        same(struct.pack(">I", len(data)) + data, monkeypatch)


@pytest.mark.parametrize("name", ["vllm_pd.pb"])
def test_real_spans_give_the_same_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same((FIXTURES / name).read_bytes(), monkeypatch)


def test_damaged_bytes_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    good = of_spans(*USUAL.values(), PLAIN)
    assert otlp.wire.probe(good) == "traces"
    for _ in range(60):
        data = bytearray(good)
        for _ in range(draw.choice((1, 1, 3))):
            data[draw.randrange(len(data))] = draw.choice(
                (0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256))
            )
        end = len(data) if draw.random() < 0.7 else draw.randrange(1, len(data))
        same(struct.pack(">I", len(data)) + bytes(data[:end]), monkeypatch)


def test_a_length_beyond_all_bytes_costs_its_own_message_only() -> None:
    length = (
        b"\xf9" + b"\xff" * 8 + b"\x01"
    )  # 2^64 - 7: ptars takes the end for one before the start, and panics
    damaged = b"\x0a\x14\x12" + length + b"abcdefghi"
    good = [framed(request(span(spanId=f"0{n}" * 8))) for n in (1, 2)]
    found = kept(good[0] + struct.pack(">I", len(damaged)) + damaged + good[1])
    assert len(found.rows["spans"]) == 2
    assert [name for name, _ in found.told].count("skip") == 1


def test_steps_are_given_up_where_they_read_little() -> None:
    steps = Steps()
    steps.count(60_000, 10_000)
    assert not steps.worth
    steps.count(60_000, 60_000)
    assert steps.worth


# ---- blocks ahead --------------------------------------------------------------------------------


def test_results_come_in_order_and_an_error_after_all_before_it() -> None:
    def tasks() -> Iterator[Any]:
        for number in range(20):
            yield lambda number=number: number * number
        raise OSError("gone")

    found: list[int] = []
    with pytest.raises(OSError, match="gone"):
        found.extend(in_order(tasks(), threads=3, ahead=5))
    blocks = in_order((lambda n=n: n for n in range(9)), threads=2, ahead=4)  # type: ignore[misc]
    assert next(blocks) == 0
    blocks.close()  # what is begun ends, nothing waits for ever
    assert list(in_order(iter([]), threads=2, ahead=3)) == []


def test_no_more_is_read_ahead_than_asked_for() -> None:
    asked: list[int] = []

    def tasks() -> Iterator[Any]:
        for number in range(50):
            asked.append(number)
            yield lambda: 1

    for taken_so_far, _ in enumerate(in_order(tasks(), threads=2, ahead=4)):
        assert len(asked) <= taken_so_far + 4
