"""What the responses of one request in GenAI-Perf's export say: instants of text, usage, how it ended."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from pdtrace.records import dataclass

from ._common import integer, loads
from ._errors import UNNAMED, error_kind

_TEXTS = ("content", "reasoning_content", "reasoning", "text", "tool_calls", "function_call")


@dataclass
class Answer:
    """One request: `times_ns` are the responses that hold text."""

    times_ns: list[int] = field(default_factory=list)
    end_ns: int | None = None
    streaming: bool | None = None
    status: str = "unknown"
    error: str | None = None
    request_id: str | None = None
    session: str | None = None
    model: str | None = None
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None


def answer_of(request: dict[str, Any]) -> Answer:
    """The request's answer; texts are looked at and dropped."""
    answer = Answer()
    times = [t for t in map(integer, request.get("response_timestamps") or []) if t is not None]
    outputs = request.get("response_outputs") or []
    _asked(answer, request)
    if times:
        answer.end_ns, answer.status = times[-1], "completed"
    if len(outputs) != len(times):
        return answer  # which response came when is not known
    for time, text in zip(times, _whole([_text(o) for o in outputs]), strict=True):
        if _take(answer, text):
            answer.times_ns.append(time)
    if answer.streaming is None:
        answer.streaming = True if len(answer.times_ns) > 1 else None
    return answer


def _asked(answer: Answer, request: dict[str, Any]) -> None:
    inputs = request.get("request_inputs") or {}
    session = inputs.get("session_id", request.get("sequence_id"))
    answer.session = None if session in (None, "", 0) else str(session)
    try:
        payload = loads(str(inputs.get("payload") or "{}").encode())
    except ValueError:
        return
    if isinstance(payload, dict) and payload:
        answer.model = payload["model"] if isinstance(payload.get("model"), str) else None
        answer.streaming = bool(payload.get("stream", False))
        answer.max_tokens = integer(payload.get("max_completion_tokens", payload.get("max_tokens")))


def _text(output: Any) -> str:
    """The body of a response; Triton's own endpoints give the text alone."""
    if not isinstance(output, dict):
        return ""
    if "response" in output:
        return str(output["response"] or "")
    return f'{{"text_output":{"1" if output.get("text_output") else "null"}}}'


def _whole(texts: list[str]) -> list[str]:
    """Server-sent events that were split between two responses belong to the one in which they began."""
    texts = list(texts)
    for place in range(len(texts) - 1, 0, -1):
        text = texts[place]
        if text and not text.startswith(("data:", ":", "event:", "id:", "retry:", "{")):
            head, mark, rest = text.partition("data:")
            texts[place - 1] += head
            texts[place] = mark + rest
    return texts


def _take(answer: Answer, text: str) -> bool:
    """Whether the response holds text; what else it says is kept."""
    found = False
    for event in text.split("\n\n"):
        lines = [
            line.partition(":")[2].strip() for line in event.split("\n") if line.startswith("data:")
        ]
        if "event: error" in event:
            _failed(answer, None)
        for body in lines or [event.strip()]:
            if body.startswith("{"):
                try:
                    found |= _take_object(answer, loads(body.encode()))
                except ValueError:
                    continue
    return found


def _take_object(answer: Answer, body: Any) -> bool:
    if not isinstance(body, dict):
        return False
    if body.get("error"):
        _failed(answer, body["error"])
    if isinstance(body.get("id"), str) and answer.request_id is None:
        answer.request_id = body["id"]
    _usage(answer, body.get("usage"))
    found = bool(body.get("text_output"))
    for choice in body.get("choices") or []:
        if isinstance(choice, dict):
            told = choice.get("delta") or choice.get("message") or choice
            found |= any(bool(told.get(key)) for key in _TEXTS)
            if isinstance(choice.get("finish_reason"), str):
                answer.finish_reason = choice["finish_reason"]
    return found


def _usage(answer: Answer, usage: Any) -> None:
    if isinstance(usage, dict):
        answer.prompt_tokens = integer(usage.get("prompt_tokens"))
        answer.output_tokens = integer(usage.get("completion_tokens"))
        answer.cached_tokens = integer(
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        )


def _failed(answer: Answer, error: Any) -> None:
    """The kind of an error; its message may quote the prompt."""
    answer.status = "failed"
    kind = error.get("type") or error.get("code") if isinstance(error, dict) else None
    answer.error = error_kind(kind) or answer.error or UNNAMED
