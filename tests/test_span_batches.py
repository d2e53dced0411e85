"""Spans that stay Arrow: their kinds, their attributes and their copies are those of a table; hand-made."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from pdtrace import _aside, _span_batches, interpret, spans
from pdtrace.store import Store


def batch(*rows: dict[str, Any]) -> pa.Table:
    """Spans as a reader of blocks gives them: texts that repeat as dictionaries."""
    few = ("name", "scope_name", "string_keys", "double_keys")
    kinds = {
        "source": pa.int32(), "record": pa.int64(), "trace_id": pa.string(), "span_id": pa.string(),
        "start_ns": pa.int64(), **dict.fromkeys(few, pa.string()),
        "string_values": pa.list_(pa.string()), "double_values": pa.list_(pa.float64()),
    }  # fmt: skip
    table = pa.table(
        {name: pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()}
    )
    for name in few:
        at = table.column_names.index(name)
        table = table.set_column(at, name, table.column(name).dictionary_encode())
    return table


def span(
    span_id: str, strings: dict[str, str], doubles: dict[str, float], **more: Any
) -> dict[str, Any]:
    """A row of a batch."""
    return {
        "source": 0, "record": 0, "trace_id": "t", "span_id": span_id, "start_ns": 5, "name": "llm_request",
        "scope_name": "vllm", "string_keys": "\x1f".join(strings) or None, "string_values": list(strings.values()),
        "double_keys": "\x1f".join(doubles) or None, "double_values": list(doubles.values()), **more,
    }  # fmt: skip


FIRST = batch(
    span("a", {"id": "A", "model": "m"}, {"ttft": 0.5, "e2e": 1.0}),
    span("b", {"model": "m", "id": "B"}, {"e2e": 2.0}),
)
SECOND = batch(span("c", {}, {"ttft": 0.25}, name="other"), span("d", {"id": "D"}, {}))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that keeps two batches of spans as Arrow."""
    monkeypatch.setattr(_aside, "LEAST_SPANS", 1)
    store = Store()
    store.append("spans", FIRST)
    store.append("spans", SECOND)
    return store


def test_attributes_stand_with_their_spans_wherever_they_lie_in_the_lists() -> None:
    asked = {
        "id": ("id", str, ["string"]),
        "ttft": ("ttft", float, ["double"]),
        "e2e": ("e2e", float, ["double"]),
    }
    found = _span_batches.frame([FIRST, SECOND], ["span_id", "name", "scope_name", "kind"], asked)
    assert found is not None
    assert found.select("span_id", "name", "scope_name", "kind", "id", "ttft", "e2e").rows() == [
        ("a", "llm_request", "vllm", None, "A", 0.5, 1.0),
        ("b", "llm_request", "vllm", None, "B", None, 2.0),
        ("c", "other", "vllm", None, None, 0.25, None),
        ("d", "llm_request", "vllm", None, "D", None, None),
    ]


def test_a_number_asked_of_texts_is_left_to_sql() -> None:
    assert _span_batches.frame([FIRST], ["span_id"], {"id": ("id", int, ["int", "string"])}) is None


def test_kinds_are_those_of_the_table(store: Store) -> None:
    found = _span_batches.kinds(store.batches_aside("spans"))
    store.settle_aside()
    assert found is not None
    assert sorted(found, key=str) == sorted(spans.kinds(store.connection), key=str)
    assert len(found) == 4


def test_a_copy_in_another_batch_counts_once(store: Store) -> None:
    assert interpret.deduplicate(store).height == 0
    store.execute("DROP TABLE span_twins")
    store.append("spans", batch(span("b", {"model": "m", "id": "B"}, {"e2e": 2.0}, source=1)))
    removed = interpret.deduplicate(store)
    assert removed.select("source", "reason", "records").rows() == [(1, spans.IN_ANOTHER_SOURCE, 1)]
    assert store.count("spans") == 4


def test_text_that_is_no_utf8_is_refused(store: Store) -> None:
    bad = batch(span("e", {}, {}))
    raw = pa.array([b"\xff"], pa.binary()).cast(pa.string(), safe=False)
    at = bad.column_names.index("trace_id")
    with pytest.raises(pa.ArrowInvalid):
        store.append("spans", bad.set_column(at, "trace_id", raw))
    assert store.sql("SELECT trace_id FROM spans").equals(pl.DataFrame({"trace_id": ["t"] * 4}))
