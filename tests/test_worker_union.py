"""Names of one worker that only its deployment tells: log and service, metrics and server, table and router."""

from __future__ import annotations

from typing import Any

from pdtrace._worker_union import unite
from pdtrace.store import Store


def worker(store: Store, name: str, **more: Any) -> None:
    """A worker with its own alias; `aliases` are further ones, `legs` the observer of one request."""
    aliases = more.pop("aliases", {})
    legs, requests = more.pop("legs", None), more.pop("requests", ["r"])
    start = more.pop("process_start", None)
    store.append("workers", [{"worker": name, "deployment": "d", **more}])
    kind, _, value = name.partition(":")
    named = {kind: value.partition("@")[0], **aliases}
    store.append(
        "worker_aliases", [{"worker": name, "kind": k, "value": v} for k, v in named.items()]
    )
    if legs:
        store.append(
            "legs",
            [{"leg": f"{name}/{r}", "worker": name, "observer": legs, "request": r, "deployment": "d"} for r in requests],
        )  # fmt: skip
    if start:
        store.append("facts", [{"worker": name, "key": "process_start_time_s", "value": start}])


def names(store: Store) -> set[str]:
    unite(store)
    return set(store.sql("SELECT worker FROM workers")["worker"])


def test_a_log_is_the_service_that_it_names(store: Store) -> None:
    worker(store, "service:front@0123456789", role="frontend", legs="frontend")
    worker(store, "file:front.log", role="frontend", aliases={"service": "front"}, legs="frontend")
    assert names(store) == {"file:front.log"}
    assert set(store.sql("SELECT worker FROM legs")["worker"]) == {"file:front.log"}


def test_two_logs_of_a_service_stay_apart(store: Store) -> None:
    worker(store, "service:front@0123456789", role="frontend", legs="frontend")
    for file in ("file:a.log", "file:b.log"):
        worker(store, file, role="frontend", aliases={"service": "front"}, legs="frontend")
    assert len(names(store)) == 3


def test_metrics_of_the_only_frontend_are_its(store: Store) -> None:
    worker(store, "instance:7:abc", role="frontend", engine="E", legs="frontend")
    worker(store, "worker_id:12", role="frontend", engine="E", aliases={"file": "m.prom"})
    assert names(store) == {"instance:7:abc"}
    assert store.sql("SELECT kind, value FROM worker_aliases WHERE kind = 'worker_id'").rows() == [
        ("worker_id", "12")
    ]


def test_metrics_of_two_frontends_are_nobodys(store: Store) -> None:
    worker(store, "instance:7:abc", role="frontend", legs="frontend")
    worker(store, "worker_id:12", role="frontend")
    worker(store, "worker_id:13", role="frontend")
    assert len(names(store)) == 3


def test_scrapes_of_one_process_are_the_only_engine(store: Store) -> None:
    worker(store, "instance:u", engine="E", legs="engine")
    worker(store, "file:before.prom", engine="E", process_start="5.000")
    worker(store, "file:after.prom", engine="E", process_start="5.000")
    assert names(store) == {"instance:u"}


def test_scrapes_of_two_processes_are_nobodys(store: Store) -> None:
    worker(store, "instance:u", engine="E", legs="engine")
    worker(store, "file:one.prom", engine="E", process_start="5.000")
    worker(store, "file:two.prom", engine="E", process_start="6.000")
    assert len(names(store)) == 3


def test_with_two_engines_a_scrape_may_be_of_either(store: Store) -> None:
    worker(store, "instance:p", engine="E", legs="engine")
    worker(store, "instance:d", engine="E", legs="engine")
    worker(store, "file:one.prom", engine="E")
    assert len(names(store)) == 3


def test_a_table_written_by_the_router_is_the_router(store: Store) -> None:
    worker(
        store, "instance:proxy", role="router", engine="proxy", legs="router", requests=["a", "b"]
    )
    worker(store, "file:proxy.jsonl", role="router", legs="router", requests=["a", "b"])
    worker(store, "file:client.jsonl", role="client", legs="client", requests=["a", "b"])
    assert names(store) == {"instance:proxy", "file:client.jsonl"}


def test_uniting_again_changes_nothing(store: Store) -> None:
    worker(store, "service:front@0123456789", role="frontend", legs="frontend")
    worker(store, "file:front.log", role="frontend", aliases={"service": "front"})
    unite(store)
    assert unite(store) == {}


def test_metrics_of_one_side_of_a_pair_are_the_only_worker_of_that_side(store: Store) -> None:
    for role in ("prefill", "decode"):
        worker(store, f"file:{role}.prom", role=role, engine="vLLM")
        worker(store, f"instance:{role}", role=role, engine="vLLM", legs="engine", requests=[role])
    assert names(store) == {"instance:prefill", "instance:decode"}


def test_metrics_of_one_of_two_decode_workers_are_nobodys(store: Store) -> None:
    worker(store, "file:decode.prom", role="decode", engine="vLLM")
    for n in "12":
        worker(store, f"instance:d{n}", role="decode", engine="vLLM", legs="engine", requests=[n])
    assert len(names(store)) == 3
