"""Workers: which names mean the same process."""

from __future__ import annotations

from typing import Any

import pytest

from pdtrace import workers
from pdtrace.store import Store

T0 = 1_790_000_000_000_000_000
S = 10**9


class Names:
    """Workers as collectors declare them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.paths: dict[str, int] = {}

    def __call__(self, worker: str, path: str, *aliases: tuple[str, str], **row: Any) -> None:
        if path not in self.paths:
            self.paths[path] = len(self.paths) + 1
            self.store.append("sources", [{"source": self.paths[path], "path": path}])
        for key in ("start", "end"):
            if key in row:
                row[f"{key}_ns"] = T0 + row.pop(key) * S
        self.store.append("workers", [{"worker": worker, **row}])
        self.store.append(
            "worker_aliases",
            [
                {"source": self.paths[path], "worker": worker, "kind": k, "value": v}
                for k, v in aliases
            ],
        )

    def resolved(self) -> set[str]:
        workers.resolve(self.store)
        first = self.store.sql("FROM workers ORDER BY worker")
        workers.resolve(self.store)
        assert first.equals(self.store.sql("FROM workers ORDER BY worker"))
        return set(first["worker"])


@pytest.fixture
def names(store: Store) -> Names:
    return Names(store)


def test_rows_that_share_a_global_alias_are_one_and_complete_each_other(names: Names) -> None:
    names(
        "instance:u",
        "a/t.json",
        ("instance", "u"),
        ("engine_id", "k"),
        engine="vLLM",
        start=5,
        end=9,
    )
    names(
        "engine_id:k",
        "a/p.log",
        ("engine_id", "k"),
        role="prefill",
        role_basis="log",
        start=1,
        end=6,
    )
    names.store.append(
        "facts",
        [
            {
                "source": 2,
                "worker": "engine_id:k",
                "key": "kv_connector",
                "value": "NixlPullConnector",
            }
        ],
    )
    names.store.append("steps", [{"source": 2, "worker": "engine_id:k", "seq": 1}])
    names.store.append("decisions", [{"source": 2, "router": "r", "worker": "engine_id:k"}])
    names.store.append(
        "transfers", [{"source": 2, "source_worker": "engine_id:k", "destination_worker": "x"}]
    )
    assert names.resolved() == {"instance:u"}
    row = names.store.sql("FROM workers").row(0, named=True)
    assert (row["engine"], row["role"], row["role_basis"], row["start_ns"], row["end_ns"]) == (
        "vLLM",
        "prefill",
        "log",
        T0 + S,
        T0 + 9 * S,
    )
    for column, table in (
        ("worker", "facts"),
        ("worker", "steps"),
        ("worker", "decisions"),
        ("source_worker", "transfers"),
    ):
        assert names.store.sql(f"SELECT {column} FROM {table}").item() == "instance:u"
    assert (
        names.store.sql("SELECT canonical FROM worker_map WHERE worker = 'engine_id:k'").item()
        == "instance:u"
    )


def test_log_by_pid_joins_the_instance_of_the_same_time(names: Names) -> None:
    names("instance:old", "a/t.json", ("instance", "old"), ("pid", "7"), start=0, end=10)
    names("instance:new", "a/t2.json", ("instance", "new"), ("pid", "7"), start=5000, end=5010)
    names("pid:7@a", "a/server.log", ("pid", "7"), ("file", "a/server.log"), start=4990, end=5011)
    assert names.resolved() == {"instance:old", "instance:new"}
    assert (
        names.store.sql("SELECT canonical FROM worker_map WHERE worker = 'pid:7@a'").item()
        == "instance:new"
    )


def test_log_that_knows_its_kv_engine_still_joins_the_instance_by_pid(names: Names) -> None:
    names("instance:p", "a/t.json", ("instance", "p"), ("pid", "7"), start=0, end=10)
    names("engine_id:k", "a/p.log", ("engine_id", "k"), ("pid", "7"), start=0, end=10)
    assert names.resolved() == {"instance:p"}


def test_pid_that_two_instances_of_the_time_have_joins_none(names: Names) -> None:
    names("instance:p", "a/t.json", ("instance", "p"), ("pid", "1"), start=0, end=10)
    names("instance:d", "a/t.json", ("instance", "d"), ("pid", "1"), start=0, end=10)
    names("pid:1@a", "a/server.log", ("pid", "1"), start=0, end=10)
    assert names.resolved() == {"instance:p", "instance:d", "pid:1@a"}


def test_same_pid_elsewhere_is_another_process(names: Names) -> None:
    names("instance:p", "a/t.json", ("instance", "p"), ("pid", "7"))
    names("pid:7@b", "b/server.log", ("pid", "7"))
    names("instance:q", "c/t.json", ("instance", "q"), ("pid", "8"), host="one")
    names("pid:8@c", "c/server.log", ("pid", "8"), host="two")
    assert len(names.resolved()) == 4


def test_edge_log_is_a_later_window_of_the_same_instance(names: Names) -> None:
    names("instance:p", "pd/t.json", ("instance", "p"), ("pid", "7"), start=0, end=180)
    names("instance:p", "edge/t.json", ("instance", "p"), ("pid", "7"), start=360, end=370)
    names("pid:7@pd", "pd/server.log", ("pid", "7"), start=-60, end=185)
    names("pid:7@edge", "edge/server.log", ("pid", "7"), start=355, end=371)
    assert names.resolved() == {"instance:p"}


def test_two_runs_of_one_pod_stay_two(names: Names) -> None:
    names("instance:a", "a/t.json", ("instance", "a"), ("pod", "vllm-0"), start=0, end=10)
    names("instance:b", "a/t.json", ("instance", "b"), ("pod", "vllm-0"), start=900, end=990)
    names("pod:vllm-0", "a/m.prom", ("pod", "vllm-0"), start=905, end=980)
    assert names.resolved() == {"instance:a", "instance:b"}
    assert (
        names.store.sql("SELECT canonical FROM worker_map WHERE worker = 'pod:vllm-0'").item()
        == "instance:b"
    )


def test_address_joins_inside_one_folder_only(names: Names) -> None:
    names("instance:a", "a/t.json", ("instance", "a"), ("address", "h:8000"))
    names("instance:b", "b/t.json", ("instance", "b"), ("address", "h:8000"))
    names("file:a/m.prom", "a/m.prom", ("file", "a/m.prom"), ("address", "h:8000"))
    assert names.resolved() == {"instance:a", "instance:b"}


def test_services_and_files_never_join_by_name(names: Names) -> None:
    names("instance:a", "a/t.json", ("instance", "a"), ("service", "vllm"))
    names("instance:b", "a/t.json", ("instance", "b"), ("service", "vllm"))
    names("service:vllm", "a/u.json", ("service", "vllm"))
    names("file:a/m.prom", "a/m.prom", ("file", "a/m.prom"))
    assert len(names.resolved()) == 4
