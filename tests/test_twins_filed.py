"""A file of requests names no server: it is the one whose spans, else whose log, tell the same requests."""

from __future__ import annotations

from typing import Any

import pytest

from pdtrace import _twins_logged, twins
from pdtrace.store import Store

EPOCH, SECOND = 1_796_000_000 * 10**9, 10**9


def store_of(told: dict[str, tuple[list[int], dict[str, Any]]], filed: list[str]) -> Store:
    """Legs `rid<n>` of SGLang's workers; those of `filed` come from files of requests."""
    store = Store()
    for worker, (numbers, given) in told.items():
        store.append("legs", [
            {"leg": f"{worker} {n}", "worker": worker, "observer": "engine", "request_id": f"rid{n}", "status": "completed",
             "start_ns": EPOCH + n * SECOND, "end_ns": EPOCH + (n + 1) * SECOND,
             **({"trace_id": f"{worker} {n}", "span_id": "1"} if given.get("spanned") else {}),
             **{k: v for k, v in given.items() if k in ("role", "start_ns", "end_ns")}}
            for n in numbers
        ])  # fmt: skip
    store.append(
        "workers",
        [{"worker": w, "engine": given.get("engine", "SGLang")} for w, (_, given) in told.items()],
    )
    store.append("worker_aliases", [{"worker": w, "kind": "file", "value": w} for w in told])
    store.append(
        "facts", [{"worker": w, "key": _twins_logged.FILE, "value": "true"} for w in filed]
    )
    return store


def grouped(store: Store) -> list[list[str]]:
    """The legs' first words, those of one worker together."""
    rows = store.rows(
        "SELECT list_sort(list(DISTINCT split_part(leg, ' ', 1))) FROM legs GROUP BY worker ORDER BY 1"
    )
    return [names for (names,) in rows]


def test_files_of_each_hour_are_their_servers_and_keep_their_records() -> None:
    spans = {"spanned": True}
    told: dict[str, tuple[list[int], dict[str, Any]]] = {
        "a": ([1, 2, 3, 4], spans), "b": ([11, 12, 13], spans),
        "a-10": ([1, 2], {}), "a-11": ([3, 4, 5], {}), "b-10": ([11, 12, 13], {}),
    }  # fmt: skip
    store = store_of(told, ["a-10", "a-11", "b-10"])
    twins.unite(store)
    assert grouped(store) == [["a", "a-10", "a-11"], ["b", "b-10"]]
    assert store.count("legs") == 15


def test_without_spans_the_log_says_whose_requests_they_are() -> None:
    store = store_of({"log": ([1, 2, 3], {}), "file": ([1, 2, 3], {})}, ["file"])
    twins.unite(store)
    assert grouped(store) == [["file", "log"]]


@pytest.mark.parametrize(
    "other",
    [
        {"spanned": True, "role": "decode"},  # of a P/D pair the other side
        {"spanned": True, "engine": "vLLM"},
        {"spanned": True, "start_ns": EPOCH + 900 * SECOND, "end_ns": EPOCH + 901 * SECOND},
    ],
)
def test_other_work_under_the_same_ids_is_another_servers(other: dict[str, Any]) -> None:
    store = store_of({"other": ([1, 2], other), "file": ([1, 2], {"role": "prefill"})}, ["file"])
    twins.unite(store)
    assert grouped(store) == [["file"], ["other"]]


def test_a_file_that_two_servers_write_is_neither() -> None:
    spans = {"spanned": True}
    store = store_of({"a": ([1, 2], spans), "b": ([3, 4], spans), "file": ([1, 2, 3, 4], {})}, ["file"])  # fmt: skip
    twins.unite(store)
    assert grouped(store) == [["a"], ["b"], ["file"]]
