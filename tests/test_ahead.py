"""Questions answered beside the making of tables: the same answers, each once what it reads is there."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from pdtrace import _ahead, _aside, ingest, library
from pdtrace._ahead import Task
from pdtrace.diagnose import ahead, diagnose
from pdtrace.store import Questions, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTHING: frozenset[str] = frozenset()


@pytest.fixture
def store() -> Iterator[Store]:
    with closing(Store()) as made:
        made.install()
        yield made


class Hand:
    def close(self) -> None:
        """Nothing to close."""


def test_of_the_tasks_that_can_begin_the_first_is_begun_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_ahead, "CONNECTIONS", 1)
    done: list[str] = []
    after = {"late": {"early"}, "other": set(), "early": set(), "last": {"late", "elsewhere"}}
    tasks = {
        name: Task[Hand](frozenset(names), lambda _, name=name: done.append(name))  # type: ignore[misc]
        for name, names in after.items()
    }
    _ahead.run(Hand, tasks)
    assert done == ["other", "early", "late", "last"]


def test_an_error_ends_the_rest_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ahead, "CONNECTIONS", 1)
    done: list[str] = []

    def fail(_: Hand) -> None:
        raise KeyError("first")

    tasks = {"first": Task(NOTHING, fail), "second": Task[Hand](NOTHING, lambda _: done.append(""))}
    with pytest.raises(KeyError, match="first"):
        _ahead.run(Hand, tasks)
    assert not done


def test_tasks_that_wait_for_each_other_are_an_error() -> None:
    tasks = {
        "a": Task[Hand](frozenset({"b"}), lambda _: None),
        "b": Task[Hand](frozenset({"a"}), lambda _: None),
    }
    with pytest.raises(ValueError, match="wait for each other"):
        _ahead.run(Hand, tasks)


def test_a_question_waits_for_the_table_that_it_reads(store: Store) -> None:
    def workers(mine: Store) -> None:
        mine.append("workers", [{"worker": "pid:1", "deployment": "d", "name": "n"}])

    questions = Questions([], [("worker_labels", {})], store.conditions())
    store.make({"workers": Task(NOTHING, workers)}, questions)
    with store.computed_once(ask=[("worker_labels", {})]):
        assert store.query("worker_labels")["worker"].to_list() == ["pid:1"]
    store.clear("workers")
    assert store.query("worker_labels").is_empty()  # asked anew behind the block


def test_a_question_that_fails_beside_is_asked_again(store: Store) -> None:
    def spoil(mine: Store) -> None:
        mine.connection.execute("ALTER TABLE workers RENAME TO elsewhere")

    questions = Questions([], [("worker_labels", {})], store.conditions())
    store.make({"workers": Task(NOTHING, spoil)}, questions)
    store.connection.execute("ALTER TABLE elsewhere RENAME TO workers")
    with store.computed_once(ask=[("worker_labels", {})]):
        assert store.query("worker_labels").is_empty()


@pytest.mark.parametrize(("phase", "asked"), [("router", True), ("queue", False)])
def test_a_finding_is_asked_where_its_condition_holds_once_the_table_is_there(
    store: Store, phase: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        _aside, "LEAST_ROWS", 1
    )  # what is kept aside by one thread is there for the other, too

    def phases(_: Store) -> None:
        store.append("phase_sums", [{"request": "r", "phase": phase}])

    known = store.conditions()
    questions = Questions([], [("router_queue", {})], known)
    store.make({"phase_sums": Task(NOTHING, phases)}, questions)
    condition = library.queries()["router_queue"].when
    assert known.told(condition) is asked
    assert [name for name, _ in store._begun.found] == ["router_queue"] * asked  # type: ignore[union-attr]
    waits = {"router_queue", "request_values", "phase_by_request"} & store._waiting
    assert (
        waits == {"router_queue"}
    ) is asked  # what only this finding reads is not made for nothing


def test_each_thread_takes_from_its_own_queue_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ahead, "CONNECTIONS", 2)
    done: dict[str, list[str]] = {"a": [], "b": []}
    met = threading.Barrier(2, timeout=60)

    def queue(own: str) -> dict[str, Task[Hand]]:
        def work(_: Hand) -> None:
            done[own].append(threading.current_thread().name)
            met.wait()  # the other one is at its own, too

        return {f"{own}{n}": Task(NOTHING, work) for n in range(3)}

    _ahead.run(Hand, queue("a"), queue("b"))
    threads = [set(names) for names in done.values()]
    assert [len(names) for names in threads] == [1, 1]
    assert threads[0] != threads[1]


def test_what_is_asked_beside_is_what_a_diagnosis_says(store: Store) -> None:
    """Of hand-made requests, with a chart's question; a table that is not made yet is left alone."""
    with closing(Store()) as other:
        for each in (store, other):
            each.append("deployments", [{"deployment": "d", "name": "d", "mode": "aggregated"}])
            each.append(
                "requests",
                [
                    {
                        "request": f"r{n}", "deployment": "d", "mode": "aggregated", "outcome": "completed",
                        "start_ns": n * 10**9, "end_ns": n * 10**9 + 10**8 * (n + 2), "ttft_ms": 50.0 + n,
                        "first_token_ns": n * 10**9 + 10**6 * (50 + n), "e2e_ms": 100.0 * (n + 2),
                        "output_tokens": 10 * (n + 1), "prompt_tokens": 100,
                    }
                    for n in range(60)
                ],
            )  # fmt: skip
        ingest.cut_to_window(other, ingest.Options())
        expected = diagnose(other).to_dict()
        series = other.query("time_series", bins=4)
    asked: list[str] = []

    def what(given: Store) -> Questions:
        questions = ahead(given, also=[("time_series", {"bins": 4})])
        asked.extend([*questions.names, *(name for name, _ in questions.ask)])
        return questions

    ingest.cut_to_window(store, ingest.Options(ahead=what))
    assert {"request_values", "latency_by_observer", "long_output", "time_series"} <= set(asked)
    assert {"phase_summary", "engine_queue", "finding_windows"} <= set(asked)
    assert store._begun is not None
    assert {name for name, _ in store._begun.found} > {"phase_summary", "time_series"}
    assert diagnose(store).to_dict() == expected
    assert (
        store.query("time_series", bins=4)
        .sort("bin", "worker")
        .equals(series.sort("bin", "worker"))
    )
    assert not store.rows("SELECT 1 FROM duckdb_tables() WHERE table_name = 'request_values'")
