"""Perf Analyzer's export: which responses hold text, and what is never guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdtrace.collectors import genai_perf
from pdtrace.collectors._genai_perf_responses import answer_of
from pdtrace.inputs import expand


def chunk(text: str | None, **more: Any) -> str:
    delta = {} if text is None else {"content": text}
    return f"data: {json.dumps({'id': 'chatcmpl-7', 'choices': [{'delta': delta}], **more})}\n\n"


def asked(
    *responses: str, times: list[int] | None = None, payload: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "timestamp": 1_000,
        "request_inputs": {"payload": json.dumps({"model": "m", "stream": True, **(payload or {})})},
        "response_timestamps": times or [2_000 * (n + 1) for n in range(len(responses))],
        "response_outputs": [{"response": r} for r in responses],
    }  # fmt: skip


def test_responses_without_text_are_no_tokens() -> None:
    answer = answer_of(asked(chunk(""), chunk("a"), chunk("b"), chunk(None), "data: [DONE]\n\n"))
    assert (answer.times_ns, answer.end_ns) == ([4_000, 6_000], 10_000)
    assert (answer.status, answer.model, answer.request_id) == ("completed", "m", "chatcmpl-7")
    assert answer.output_tokens is None and answer.prompt_tokens is None


def test_events_split_or_merged_by_the_client_are_read() -> None:
    whole = chunk("a")
    answer = answer_of(asked(whole[:20], whole[20:] + chunk("b"), chunk("c") + chunk("d")))
    assert answer.times_ns == [2_000, 4_000, 6_000]


def test_usage_is_the_servers() -> None:
    usage = {
        "prompt_tokens": 12,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    answer = answer_of(asked(chunk("a"), chunk("b"), chunk(None, usage=usage)))
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (12, 2, 8)


def test_an_error_event_fails_the_request_and_its_message_is_dropped() -> None:
    answer = answer_of(
        asked(chunk("a"), 'data: {"error": {"type": "overloaded", "message": "secret prompt"}}\n\n')
    )
    assert (answer.status, answer.error) == ("failed", "overloaded")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_not_streamed_has_no_first_token(
    stream: bool, collect: Callable[..., Any], tmp_path: Path
) -> None:
    body = json.dumps(
        {
            "id": "cmpl-1",
            "choices": [{"message": {"content": "all"}}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 9},
        }
    )
    path = tmp_path / "profile_export.json"
    requests = [asked(body if not stream else chunk("all"), payload={"stream": stream})]
    path.write_text(
        json.dumps(
            {
                "experiments": [
                    {"experiment": {"mode": "concurrency", "value": 1}, "requests": requests}
                ]
            }
        )
    )
    (leg,) = collect(genai_perf, path)["legs"].to_dicts()
    assert (leg["ttft_ms"] is None) is not stream
    assert leg["e2e_ms"] == 0.001 and leg["streaming"] is stream


def test_triton_gives_text_alone() -> None:
    request = {"timestamp": 1, "request_inputs": {"text_input": "secret"}, "response_timestamps": [3, 5, 8],
               "response_outputs": [{"text_output": "I"}, {"text_output": " like"}, {"text_output": ""}]}  # fmt: skip
    answer = answer_of(request)
    assert (answer.times_ns, answer.streaming, answer.model) == ([3, 5], True, None)


def test_two_loads_are_two_clients_and_no_text_is_stored(
    collect: Callable[..., Any], tmp_path: Path
) -> None:
    experiment = [
        {"experiment": {"mode": "concurrency", "value": n}, "requests": [asked(chunk("SECRET"), chunk("b")), {"timestamp": None}]}
        for n in (1, 2)
    ]  # fmt: skip
    path = tmp_path / "profile_export.json"
    path.write_text(json.dumps({"experiments": experiment, "version": "2"}))
    found = collect(genai_perf, path)
    assert found["legs"]["worker"].n_unique() == 2 and found["legs"].height == 2
    assert found.account.read == 4 and found.account.reasons == {genai_perf.NO_START: 2}
    assert "SECRET" not in json.dumps([found[t].to_dicts() for t in ("legs", "streams", "facts")])
    assert sorted(found["facts"].filter(key="max_concurrency")["value"]) == ["1", "2"]


@pytest.mark.parametrize(
    "content", ['{"experiments": [', '{"experiments": []}', "[]", '{"experiments": [3]}']
)
def test_cut_or_empty_files_are_no_error(
    collect: Callable[..., Any], tmp_path: Path, content: str
) -> None:
    path = tmp_path / "profile_export.json"
    path.write_text(content)
    assert collect(genai_perf, path)["legs"].height == 0


def test_the_aggregates_are_named_and_not_used(tmp_path: Path) -> None:
    path = tmp_path / "profile_export_genai_perf.json"
    path.write_text('{"input_config": {}, "time_to_first_token": {"avg": 3}}')
    match = genai_perf.sniff(expand([str(path)])[0].head())
    assert match is not None and match.ignore
