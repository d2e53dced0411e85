"""What the fields of an answer say: usage, model, id, finish reasons, errors. For the recorder's thread.

Known are chat and text completions, the Responses API and Anthropic's messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdtrace.instrumentation.request_ids import MAX_CHARACTERS, of_answer
from pdtrace.instrumentation.requests import Request


def told(request: Request, answer: Mapping[str, Any]) -> None:
    """Usage, model, id, finish reasons and errors of an answer, or of one event of it, as attributes."""
    begins = answer.get("type") == "message_start"
    for wrapper in ("response", "message"):  # typed events wrap what an answer in one piece is
        inner = answer.get(wrapper)
        if isinstance(inner, dict):
            answer = inner
    found: dict[str, Any] = {}
    usage = answer.get("usage")
    if isinstance(usage, dict):
        found.update(_usage(usage))
    if begins:  # its count of output tokens is one that the last event corrects, if that comes
        found.pop("output_tokens", None)
    reasons = _reasons(answer)
    if reasons:
        before = request.attributes.get("finish_reasons", [])
        found["finish_reasons"] = [*before, *(reason for reason in reasons if reason not in before)]
    named = answer.get("id")  # of every event of a stream too
    if isinstance(named, str) and named:
        # Engines that do not read X-Request-Id have ids of their own beside it.
        bare = of_answer(named)[:MAX_CHARACTERS]
        known = request.attributes.get("request_id")
        found["request_id" if known in (None, bare) else "engine_id"] = bare
    model = answer.get("model")
    if isinstance(model, str) and "model" not in request.attributes:
        found["model"] = model[:MAX_CHARACTERS]
    if request.error is None:
        request.error = _error(answer)
    request.attributes.update({key: value for key, value in found.items() if value is not None})


def _error(answer: Mapping[str, Any]) -> str | None:
    """The kind of an error, never its text. Servers that fail in the midst of a stream have sent status 200
    long before."""
    error = answer.get("error")
    if isinstance(error, dict):
        code = error.get("type") or error.get("code")
    elif isinstance(error, str) and error:
        code = answer.get("error_type")  # text-generation-inference has it beside the text
    elif answer.get("object") == "error":  # vLLM before 0.10
        code = answer.get("type")
    elif answer.get("type") == "error":
        code = answer.get("code")
    else:
        return None
    return str(code or "error")[:64]


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    prompt = count_of(usage, "prompt_tokens", "input_tokens")
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = count_of(details, "cached_tokens") if isinstance(details, dict) else None
    read = count_of(usage, "cache_read_input_tokens")
    if read is not None and prompt is not None and cached is None:
        # Anthropic's input_tokens are those behind what was cached.
        cached, prompt = read, prompt + read + (count_of(usage, "cache_creation_input_tokens") or 0)
    output = count_of(usage, "completion_tokens", "output_tokens")
    return {"prompt_tokens": prompt, "output_tokens": output, "cached_tokens": cached}


def _reasons(answer: Mapping[str, Any]) -> list[str]:
    choices = answer.get("choices")
    if isinstance(choices, list):
        named = [c.get("finish_reason") for c in choices if isinstance(c, dict)]
        return [reason for reason in named if isinstance(reason, str)]
    details, delta = answer.get("incomplete_details"), answer.get("delta")
    for place, key in ((details, "reason"), (delta, "stop_reason"), (answer, "stop_reason")):
        reason = place.get(key) if isinstance(place, dict) else None
        if isinstance(reason, str):
            return [reason]
    done = answer.get("object") == "response" and answer.get("status") == "completed"
    return ["stop"] if done else []


def count_of(fields: Mapping[str, Any], *names: str) -> int | None:
    """The whole number that stands under the first of these names."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
