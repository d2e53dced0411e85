"""Spellings of the attributes and phase names that spans of unknown systems carry."""

# ruff: noqa: S105 -- lists of spellings; a token is no password
from __future__ import annotations

import polars as pl

from pdtrace import semconv

PROMPT_TOKENS = (
    semconv.INPUT_TOKENS, "gen_ai.usage.prompt_tokens", "llm.token_count.prompt", "llm.usage.prompt_tokens",
    "llm.usage.input_tokens",
)  # fmt: skip
OUTPUT_TOKENS = (
    semconv.OUTPUT_TOKENS, "gen_ai.usage.completion_tokens", "llm.token_count.completion",
    "llm.usage.completion_tokens", "llm.usage.output_tokens",
)  # fmt: skip
CACHED_TOKENS = (
    semconv.CACHED_TOKENS, "gen_ai.usage.cached_tokens", "gen_ai.usage.cache_read_input_tokens",
    "gen_ai.usage.prompt_tokens_details.cached_tokens", "llm.token_count.prompt_details.cache_read",
    "llm.usage.cache_read_input_tokens", "llm.serving.cached_tokens",
)  # fmt: skip
MAX_TOKENS = (semconv.REQUEST_MAX_TOKENS, "llm.request.max_tokens")
MODELS = (semconv.REQUEST_MODEL, "gen_ai.response.model", "llm.model_name", "llm.request.model")
REQUEST_IDS = ("x_request_id", "x-request-id", "http.request.header.x-request-id", "gen_ai.request.id",
               "request.id", "request_id", "gen_ai.response.id")  # fmt: skip
SESSIONS = (semconv.CONVERSATION_ID, "session.id", "langfuse.session.id", "conversation.id")
TENANTS = (
    "tenant.id",
    "user.id",
    "enduser.id",
    "gen_ai.user.id",
    "llm.user",
    "gen_ai.request.user",
    "langfuse.user.id",
)
ROUTES = ("http.route", "url.path", "http.target")
HTTP_STATUS = (semconv.HTTP_STATUS, "http.status_code")
FINISH_REASONS = (semconv.RESPONSE_FINISH_REASONS, "gen_ai.completion.0.finish_reason")
# Seconds from the start of the span to its first token or chunk.
TTFT_SECONDS = (semconv.LATENCY_TTFT, "gen_ai.response.time_to_first_chunk", "gen_ai.server.time_to_first_token",
                "gen_ai.response.time_to_first_token", "llm.time_to_first_token")  # fmt: skip
ENGINE_LATENCIES = (
    semconv.LATENCY_QUEUE, semconv.LATENCY_TTFT, semconv.LATENCY_E2E, semconv.LATENCY_PREFILL, semconv.LATENCY_DECODE,
    "gen_ai.latency.time_in_model_inference", "gen_ai.latency.kv_cache_transfer_time",
)  # fmt: skip
LATENCIES = (*ENGINE_LATENCIES, "gen_ai.response.time_to_first_chunk")
KV_BYTES = (semconv.KV_BYTES, "llm.kv.bytes", "kv.bytes", "kv_transfer.bytes", "transfer.bytes")
KV_BACKENDS = (semconv.KV_BACKEND, "llm.kv.backend", "kv.backend", "kv_transfer.backend")
INFERENCE_OPERATIONS = (
    "chat",
    "text_completion",
    "generate_content",
    "completion",
    "embeddings",
    "responses",
)

# OpenInference's kind of span (Phoenix); OpenLLMetry's kind of request, from before gen_ai.operation.name
OPENINFERENCE_KIND, OPENLLMETRY_TYPE = "openinference.span.kind", "llm.request.type"

# The last word of a span's name -> phase detail; only words that mean nothing else in a serving trace.
PHASE_WORDS = {
    "queue": "prefill_queue", "queued": "prefill_queue", "queue_wait": "prefill_queue", "queueing": "prefill_queue",
    "prefill": "prefill_wall",
    "kv_transfer": "kv_transfer", "kv_cache_transfer": "kv_transfer", "transfer_kv": "kv_transfer",
    "kv_load": "kv_load", "load_cache": "kv_load",
    "decode": "decode_wall",
}  # fmt: skip
ROUTER_NAME = (
    r"^(?:[a-z]+\.)?rout(?:er|e|ing)(?:[._/ -](?:schedule|select|decide|pick|route|dispatch).*)?$"
)
FIRST_TOKEN_EVENT = r"^(?:gen_ai[._]|llm[._])?first[ _.-]?(?:token|chunk)(?:[ _.-].*)?$"
NOT_A_REQUEST = r"^(?:GET|HEAD|OPTIONS|DELETE)\b|(?i)health|/metrics|readyz|livez|/ping"

TEXTS = (
    *MODELS,
    *REQUEST_IDS,
    *SESSIONS,
    *TENANTS,
    *ROUTES,
    *FINISH_REASONS,
    *KV_BACKENDS,
    semconv.ERROR_TYPE,
    semconv.OPERATION_NAME,
    OPENINFERENCE_KIND,
    OPENLLMETRY_TYPE,
)
COUNTS = (*PROMPT_TOKENS, *OUTPUT_TOKENS, *CACHED_TOKENS, *MAX_TOKENS, *HTTP_STATUS, *KV_BYTES)


def first_of(keys: tuple[str, ...]) -> pl.Expr:
    """The first of these attributes that a span has."""
    return pl.coalesce([pl.col(key) for key in keys])


def is_inference() -> pl.Expr:
    """Whether a span says that it is a call of a model, in any of the conventions' words."""
    kinds = [pl.col(key) for key in (semconv.OPERATION_NAME, OPENINFERENCE_KIND, OPENLLMETRY_TYPE)]
    # before gen_ai.operation.name (LiteLLM to this day): a model, what it was asked and what it answered.
    # Engines say that of their own halves of a request (SGLang, TensorRT-LLM), with times that only they know.
    spoke = [first_of(keys).is_not_null() for keys in (MODELS, PROMPT_TOKENS, OUTPUT_TOKENS)]
    within = first_of(ENGINE_LATENCIES).is_not_null()
    return pl.any_horizontal(
        pl.all_horizontal(*[kind.is_null() for kind in kinds], *spoke, within.not_()),
        pl.col(semconv.OPERATION_NAME).is_in(INFERENCE_OPERATIONS),
        pl.col(OPENINFERENCE_KIND).str.to_uppercase() == "LLM",
        pl.col(OPENLLMETRY_TYPE).is_in(INFERENCE_OPERATIONS),
    ).fill_null(value=False)


def phase_detail() -> pl.Expr:
    """The phase detail that a span's name says, or NULL."""
    word = (
        pl.col("name")
        .str.to_lowercase()
        .str.replace_all(r"[ -]", "_")
        .str.extract(r"([a-z_]+)$", 1)
    )
    by_word = word.replace_strict(PHASE_WORDS, default=None, return_dtype=pl.String)
    return pl.when(pl.col("name").str.to_lowercase().str.contains(ROUTER_NAME)).then(pl.lit("router_decide")).otherwise(by_word)  # fmt: skip


def speaks_of_models() -> pl.Expr:
    """Whether a span carries anything of a model call."""
    keys = (*MODELS, *PROMPT_TOKENS, *OUTPUT_TOKENS, *TTFT_SECONDS, semconv.OPERATION_NAME)
    return pl.any_horizontal([pl.col(key).is_not_null() for key in keys])
