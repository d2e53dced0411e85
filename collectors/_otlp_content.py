"""Prompt and answer text in attributes: which keys hold it, and what stands in for it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from ._otlp_values import json_text

# A string longer than this under a key that nobody knows is taken for content as well.
LONG_BYTES = 4096

# Keys as the conventions and instrumentations write them: OpenTelemetry gen_ai (current and older),
# OpenLLMetry (traceloop), OpenInference (llm.*, input.value), Vercel AI SDK (ai.*), Langfuse,
# Logfire. What an exception says may quote the prompt; its class stands under a key of its own.
_CONTENT_KEY = re.compile(
    r"""^(
      gen_ai\.(prompt|completion|input|output|request\.messages|response\.messages|system_instructi
      ons)
    | gen_ai\.(prompt|completion)\.\d+\.(.*\.)?(content|arguments|reasoning|refusal)
    | gen_ai\.(.*\.)?(messages|content|message|system_instructions)
    | gen_ai\.tool\.(definitions|message|call\.(arguments|result))
    | gen_ai\.(retrieval|memory|evaluation)\..*(query|query\.text|documents|content|explanation)
    | (input|output)\.value
    | llm\.(prompts?|completions?)(\.\d+.*(content|text|arguments))?
    | llm\.(input_messages|output_messages|request\.messages|response\.messages|prompt_template\.va
    riables)
    | llm\.(input_messages|output_messages|prompts|completions|choices|content_completions)\..*(con
    tent|text|arguments|url|value)
    | llm\.(prompt_template\.template|function_call|tools\..*json_schema)
    | (retrieval|reranker|embedding|document|message|tool_call|image)\..*(content|text|query|argume
    nts|url)
    | (traceloop\.entity|langfuse\.(observation|trace)|mlflow\.span|crewai\..*)\.?(input|output|inp
    uts|outputs)
    | mlflow\.span(inputs|outputs)
    | ai\.(prompt|response\.(text|object|toolcalls)|toolcall\.(args|result))(\.messages|\.tools)?
    | (pydantic_ai\.)?(all_messages(_events)?|new_messages)
    | (final_result|request_data|response_data)
    | http\.(request|response)\.body(\.(content|text|value))?
    | (request|response)[._](body|text|content)
    | (.*\.)?(prompt|prompt_text|completion|completion_text|generated_text|output_text|input_text|r
    easoning_content)
    | (messages|choices|content|prompts|completions)
    | (.*\.)?(exception|error)[._](message|stacktrace|stack_trace|stack|description)
    | otel\.status_description
    )$""",
    re.VERBOSE | re.IGNORECASE,
)
# Lists of ids that conventions define: long together, and no content.
_ID_LISTS = frozenset({"pdtrace.step.member.ids"})


@lru_cache(maxsize=65536)
def is_content_key(key: str) -> bool:
    """Whether a key is known to hold prompt or answer text."""
    return _CONTENT_KEY.match(key) is not None


def stand_in(text: str) -> str:
    """The JSON text that takes the place of content: its length in characters and its hash."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f'{{"length":{len(text)},"sha256":"{digest}"}}'


@dataclass
class Counted:
    """A value that may be stored, and how many texts were taken out of it."""

    value: Any
    withheld: int = 0


def redact(value: Any, key: str = "", *, long_texts: bool = True) -> Counted:
    """A JSON value without content.

    Texts under content keys and long texts become {length, sha256}.

    A list under a content key goes as a whole, and so does one whose texts are long together (a
    prompt cut
    into pieces). Numbers are never content. `long_texts` false: length alone does not make content.
    """
    limit = LONG_BYTES if long_texts else 1 << 62
    if isinstance(value, str):
        if is_content_key(key) or len(value.encode("utf-8", "surrogatepass")) > limit:
            return Counted(orjson.loads(stand_in(value)), 1)
        return Counted(value)
    if not isinstance(value, (list, dict)):
        return Counted(value)
    size = _text_bytes(value)
    long = isinstance(value, list) and size > limit and key not in _ID_LISTS
    if size and (is_content_key(key) or long):
        return Counted(orjson.loads(stand_in(json_text(value))), 1)
    if isinstance(value, list):
        parts = [redact(item, key, long_texts=long_texts) for item in value]
        return Counted([p.value for p in parts], sum(p.withheld for p in parts))
    fields = {name: redact(item, name, long_texts=long_texts) for name, item in value.items()}
    return Counted(
        {name: p.value for name, p in fields.items()}, sum(p.withheld for p in fields.values())
    )


def _text_bytes(value: Any) -> int:
    """Bytes of all texts inside a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_text_bytes, value))
    if isinstance(value, dict):
        return sum(map(_text_bytes, value.values()))
    return 0
