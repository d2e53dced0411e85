"""What other threads begin ahead (spans laid out, legs joined) changes no row, and is of no use once its rows changed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import polars as pl
import pytest

from pdtrace import _aside, identity, ingest, interpret
from pdtrace.store import Store

FIXTURES = Path(__file__).parent / "fixtures"
TABLES = (
    "legs",
    "intervals",
    "reported",
    "workers",
    "deployments",
    "identity_edges",
    "requests",
    "observations",
    "phase_sums",
)
LEGS = [
    {"leg": f"l{n}", "worker": f"instance:w{n % 2}", "observer": "engine", "source": 0, "trace_id": f"t{n}",
     "request_id": f"q{n}", "external_id": f"x{n // 2}", "start_ns": n * 10**12, "end_ns": n * 10**12 + 10**9}
    for n in range(6)
]  # fmt: skip


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are kept aside as many are."""
    monkeypatch.setattr(_aside, "LEAST_ROWS", 1)
    monkeypatch.setattr(_aside, "LEAST_SPANS", 1)


def tables(*paths: Path) -> list[pl.DataFrame]:
    with closing(Store()) as store:
        ingest.ingest([str(path) for path in paths], store)
        return [store.sql(f"FROM {name} ORDER BY ALL") for name in TABLES]


@pytest.mark.parametrize(("name", "copied"), [("agg", False), ("pd_nixl", True), ("edge", False)])
def test_the_tables_are_those_of_one_thread(
    name: str, copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One collector's spans; with `copied` most stand in a second file too, and are taken out after the beginning."""
    paths = [FIXTURES / "vllm" / f"{name}.otlp.jsonl"]
    if copied:
        lines = paths[0].read_text().splitlines(keepends=True)
        paths.append(tmp_path / "again.jsonl")
        paths[1].write_text("".join(lines[1:] or lines) + "\n")
    ahead = tables(*paths)
    assert ahead[0].height
    for room in (interpret, identity):
        monkeypatch.setattr(room, "begin", lambda _: None)
    for one, other in zip(ahead, tables(*paths), strict=True):
        assert one.equals(other)


def test_what_was_begun_is_used_while_the_spans_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    taken: list[object] = []
    take = interpret.Begun.take

    def noted(begun: interpret.Begun, batches: object) -> object:
        taken.append(found := take(begun, batches))  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(interpret.Begun, "take", noted)
    ingest.ingest([str(FIXTURES / "vllm" / "agg.otlp.jsonl")], store)
    assert len(taken) == 1
    assert taken[0] is not None
    store.close()


def linked(*, begin: bool, later: bool) -> list[tuple[object, ...]]:
    with closing(Store()) as store:
        store.append("sources", [{"source": 0, "path": "a.jsonl"}])
        store.append("workers", [{"worker": "instance:w0"}, {"worker": "instance:w1"}])
        store.append("legs", LEGS[:4])
        begun = identity.begin(store) if begin else None
        assert (begun is not None) == begin
        if later:
            store.append("legs", LEGS[4:])
        kept = store.kept_aside("legs")
        if begun is not None and later:
            assert begun.take(kept, []) is None
        identity.link(store, begun)
        return store.rows("SELECT leg, request, deployment FROM legs ORDER BY leg")


@pytest.mark.parametrize("later", [False, True])
def test_legs_that_come_after_the_beginning_are_joined_too(later: bool) -> None:
    found = linked(begin=True, later=later)
    assert found == linked(begin=False, later=later)
    assert len(found) == (6 if later else 4)
    assert None not in {request for _, request, _ in found}


def test_links_that_come_after_the_beginning_count() -> None:
    with closing(Store()) as store:
        store.append("workers", [{"worker": "instance:w0"}, {"worker": "instance:w1"}])
        store.append("legs", [leg | {"external_id": None} for leg in LEGS[:2]])
        begun = identity.begin(store)
        store.append("decisions", [{"router": "instance:w0", "worker": "instance:w1"}])
        identity.link(store, begun)
        assert store.count("deployments") == 1


def test_a_shut_beginning_is_let_go_once() -> None:
    with closing(Store()) as store:
        store.append("legs", LEGS)
        begun = identity.begin(store)
        assert begun is not None
        kept = store.kept_aside("legs")
        assert begun.take(kept, []) is not None
        assert begun.take(kept, []) is None
