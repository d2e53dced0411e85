"""The part of a request id that travels between components, without what one server puts around it.

Source: vllm-project/vllm 0.33.0, vllm/entrypoints (prefixes, `-<prompt>` of completions),
vllm/v1/engine/parallel_sampling.py (`<choice>_`), vllm/v1/engine/input_processor.py (8 hex digits,
since 0.14). Managed APIs and the other engines use the same prefixes in their answers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_CHARACTERS = 256  # of what names something and comes from outside

_PREFIXES = (
    "cmpl-", "chatcmpl-", "embd-", "score-", "classify-", "pooling-", "pool-", "rerank-",
    "generate-tokens-", "resp_", "msg_",
)  # fmt: skip
_DECORATED = re.compile(rf"^(?:(\d+)_)?({'|'.join(_PREFIXES)})?(.*)$", re.DOTALL)
_RANDOM = re.compile(r"-[0-9a-f]{8}$")


class Travelling(NamedTuple):
    """An id as every component knows it, and the stream's number where the engine wrote one (n > 1)."""

    request_id: str
    stream: int | None = None


def of_answer(answer_id: str) -> str:
    """The id in an answer's field `id`, without the server's prefix."""
    for prefix in _PREFIXES:
        if answer_id.startswith(prefix) and len(answer_id) > len(prefix):
            return answer_id[len(prefix) :]
    return answer_id


def of_vllm_engine(engine_id: str, *, randomised: bool) -> Travelling:
    """The id behind vLLM's internal one: `0_chatcmpl-abc-1f0c9a2b` is stream 0 of `abc`.

    `cmpl-<id>-<i>` is prompt i of a call: prompt 0 keeps `<id>`, the others `<id>-<i>`.
    """
    text = _RANDOM.sub("", engine_id) if randomised else engine_id
    found = _DECORATED.match(text)
    if found is None or found[2] is None:
        return Travelling(text)
    base = found[3].removesuffix("-0") if found[2] == "cmpl-" else found[3]
    return Travelling(base, None if found[1] is None else int(found[1]))
