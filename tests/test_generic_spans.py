"""Spans of unknown systems: servers are requests, clients hops, exact phase words intervals."""

from __future__ import annotations

from typing import Any

import polars as pl

from pdtrace import semconv
from pdtrace.collectors import generic_spans

MS = 1_000_000
TYPES = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}


class Rows(dict[str, pl.DataFrame]):
    """A sink that keeps the frames."""

    def add(self, table: str, batch: Any, *, record: str | None = "record") -> None:
        self[table] = batch


def interpreted(spans: list[dict[str, Any]]) -> Rows:
    event = pl.List(pl.Struct({"time_ns": pl.Int64, "name": pl.String, "attributes": pl.String}))
    schema = {
        "source": pl.Int32, "trace_id": pl.String, "span_id": pl.String, "parent_span_id": pl.String,
        "start_ns": pl.Int64, "end_ns": pl.Int64, "name": pl.String, "kind": pl.String, "status_code": pl.String,
        "worker": pl.String, "resolution_ns": pl.Int64, "events": event, "mine": pl.Boolean,
        **{key: TYPES[kind] for key, kind in generic_spans.CLAIMS.attributes.items()},
    }  # fmt: skip
    rows = [
        {name: span.get(name) for name in schema}
        | {
            "trace_id": "t",
            "mine": span.get("mine", True),
            "kind": span.get("kind", "internal"),
            "source": 0,
        }
        for span in spans
    ]
    out = Rows()
    generic_spans.interpret(pl.DataFrame(rows, schema=schema), pl.DataFrame(), out)  # type: ignore[arg-type]
    return out


MODEL = {semconv.REQUEST_MODEL: "m", semconv.INPUT_TOKENS: 100, semconv.OUTPUT_TOKENS: 11}
FLEET = [
    {"span_id": "g", "name": "POST /v1/chat/completions", "kind": "server", "worker": "gw", "start_ns": 0, "end_ns": 330 * MS, "http.response.status_code": 200, **MODEL},
    {"span_id": "r", "parent_span_id": "g", "name": "router.schedule", "worker": "router", "start_ns": MS, "end_ns": 2 * MS},
    {"span_id": "p", "parent_span_id": "r", "name": "serve", "kind": "server", "worker": "P", "start_ns": 2 * MS, "end_ns": 60 * MS, **MODEL},
    {"span_id": "q", "parent_span_id": "p", "name": "queue", "worker": "P", "start_ns": 2 * MS, "end_ns": 10 * MS},
    {"span_id": "f", "parent_span_id": "p", "name": "prefill", "worker": "P", "start_ns": 10 * MS, "end_ns": 50 * MS},
    {"span_id": "k", "parent_span_id": "p", "name": "kv_transfer", "kind": "client", "worker": "P", "start_ns": 50 * MS, "end_ns": 60 * MS, "llm.kv.bytes": 77},
    {"span_id": "d", "parent_span_id": "r", "name": "decode", "kind": "server", "worker": "D", "start_ns": 60 * MS, "end_ns": 320 * MS, "events": [{"time_ns": 80 * MS, "name": "first_token", "attributes": None}], **MODEL},
]  # fmt: skip


def test_a_fleet_becomes_one_chain_of_legs() -> None:
    legs = {row["span_id"]: row for row in interpreted(FLEET)["legs"].to_dicts()}
    assert set(legs) == {"g", "r", "p", "d"}
    assert legs["g"]["observer"] == "gateway" and not legs["g"]["container"]
    assert legs["r"]["observer"] == "router" and legs["r"]["container"]
    assert (legs["p"]["observer"], legs["d"]["observer"], legs["d"]["role"]) == (
        "engine",
        "engine",
        "decode",
    )
    assert legs["d"]["first_token_ns"] == 80 * MS and legs["d"]["tpot_ms"] == 24
    assert (legs["g"]["prompt_tokens"], legs["g"]["status"]) == (100, "completed")


def test_exact_phase_words_are_intervals_of_the_nearest_request() -> None:
    out = interpreted(FLEET)
    rows = {(row["leg"], row["detail"]) for row in out["intervals"].to_dicts()}
    assert rows == {
        ("t/g", "router_decide"), ("t/p", "prefill_queue"), ("t/p", "prefill_wall"), ("t/p", "kv_transfer"),
        ("t/d", "decode_wall"),
    }  # fmt: skip
    assert out["transfers"].row(0, named=True)["bytes"] == 77


def test_the_same_words_without_a_model_mean_nothing() -> None:
    spans = [
        {"span_id": "a", "name": "POST /jobs", "kind": "server", "start_ns": 0, "end_ns": MS},
        {"span_id": "b", "parent_span_id": "a", "name": "queue", "start_ns": 0, "end_ns": MS},
    ]
    out = interpreted(spans)
    assert "intervals" not in out and out["legs"].height == 1


def test_probes_are_no_requests() -> None:
    out = interpreted(
        [{"span_id": "a", "name": "GET /health", "kind": "server", "start_ns": 0, "end_ns": MS}]
    )
    assert "legs" not in out


def test_a_genai_client_call_is_the_clients_view() -> None:
    call = {
        "span_id": "c", "name": "chat gpt-4o", "kind": "client", "worker": "app", "start_ns": 0, "end_ns": 1000 * MS,
        semconv.OPERATION_NAME: "chat", "gen_ai.response.time_to_first_chunk": 0.25, **MODEL,
    }  # fmt: skip
    leg = interpreted([call])["legs"].row(0, named=True)
    assert (leg["observer"], leg["role"], leg["container"], leg["ttft_ms"]) == (
        "client",
        "client",
        False,
        250,
    )


def test_a_model_with_tokens_of_both_kinds_is_a_call_without_an_operation() -> None:
    """As LiteLLM writes it; an agent's span sums its calls, and says what it is; an engine's knows its own times."""
    call = {
        "span_id": "c",
        "name": "litellm_request",
        "worker": "app",
        "start_ns": 0,
        "end_ns": 50 * MS,
    }
    call |= {
        semconv.REQUEST_MODEL: "m",
        "gen_ai.usage.prompt_tokens": 8,
        "gen_ai.usage.completion_tokens": 9,
    }
    (leg,) = interpreted([call])["legs"].to_dicts()
    assert (leg["role"], leg["prompt_tokens"], leg["output_tokens"]) == ("client", 8, 9)
    for other in (
        {semconv.OPERATION_NAME: "invoke_agent"},
        {"gen_ai.usage.completion_tokens": None},
        {semconv.LATENCY_PREFILL: 0.01},
    ):
        assert "legs" not in interpreted([call | other])


def test_failures_and_aborts() -> None:
    spans = [
        {"span_id": str(i), "name": "POST /v1/completions", "kind": "server", "start_ns": 0, "end_ns": MS, "http.response.status_code": code}
        for i, code in enumerate((200, 499, 503))
    ]  # fmt: skip
    assert interpreted(spans)["legs"]["status"].to_list() == ["completed", "aborted", "failed"]
