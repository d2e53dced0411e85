"""Names that pdtrace itself emits: spans and attributes, each with its source; imports nothing.

`gen_ai.*` is used where OpenTelemetry's GenAI conventions have a name
(open-telemetry/semantic-conventions 1.41, since 1.42 open-telemetry/semantic-conventions-genai);
`gen_ai.latency.*` is what vLLM, SGLang and TensorRT-LLM write alike without being in the
conventions; `pdtrace.*` is ours, for what nobody named yet.
"""

# ruff: noqa: S105 -- a token of a model is no password
from __future__ import annotations

SCOPE = "pdtrace"  # instrumentation scope

# ---- spans (ours). A request at one component is a SERVER span; its phases are its children.
SPAN_REQUEST = "pdtrace.request"
SPAN_DISPATCH = "pdtrace.dispatch"  # CLIENT span around a call to another component
SPAN_ROUTER = "pdtrace.router"
SPAN_QUEUE = "pdtrace.queue"
SPAN_PREFILL = "pdtrace.prefill"
SPAN_KV_TRANSFER = "pdtrace.kv_transfer"
SPAN_DECODE = "pdtrace.decode"
SPAN_PHASE = "pdtrace.phase"  # any other; its pdtrace.phase.detail says which
SPAN_STEPS = "pdtrace.steps"  # a run of engine steps, one after another; what they held, in arrays

# Phase detail (model.PHASE_DETAILS) of a phase span that does not name its own.
PHASE_SPANS = {
    SPAN_ROUTER: "router_decide",
    SPAN_QUEUE: "prefill_queue",
    SPAN_PREFILL: "prefill_wall",
    SPAN_KV_TRANSFER: "kv_transfer",
    SPAN_DECODE: "decode_wall",
    SPAN_PHASE: "unattributed",
}

# ---- attributes of OpenTelemetry's GenAI conventions (1.41, docs/gen-ai/gen-ai-spans.md)
OPERATION_NAME = "gen_ai.operation.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_CHOICES = "gen_ai.request.choice.count"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CONVERSATION_ID = "gen_ai.conversation.id"
ERROR_TYPE = "error.type"  # general conventions, attribute registry
USER_ID = "user.id"  # general conventions, attribute registry
HTTP_ROUTE = "http.route"  # HTTP conventions 1.23 and later
HTTP_STATUS = "http.response.status_code"  # HTTP conventions 1.23 and later

# ---- shared by three engines (vllm/tracing, sglang/srt/tracing, tensorrt_llm/llmapi); seconds
LATENCY_TTFT = "gen_ai.latency.time_to_first_token"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_DECODE = "gen_ai.latency.time_in_model_decode"

# ---- ours
REQUEST_ID = "pdtrace.request.id"  # id that travels between components (X-Request-ID)
ENGINE_REQUEST_ID = "pdtrace.request.engine_id"  # the component's own spelling, where it differs
REMOTE_REQUEST_ID = "pdtrace.request.remote_id"  # id that another component uses (KV comes from it)
PREEMPTIONS = "pdtrace.request.preemptions"
WORKER_ROLE = (
    "pdtrace.worker.role"  # client, gateway, router, frontend, prefill, decode, aggregated
)
PHASE_DETAIL = "pdtrace.phase.detail"  # a detail of model.PHASE_DETAILS, on a phase span
PHASE_TOKENS = "pdtrace.phase.tokens"  # tokens computed in it, as of a prefill chunk
ATTEMPT = "pdtrace.attempt"  # 0 for the first attempt
STREAM_INDEX = "pdtrace.stream.index"  # index of the stream when n > 1
TURN = "pdtrace.turn"  # turn in the conversation
ABORTED = "pdtrace.aborted"  # true when the caller left
FIRST_TOKEN_NS = "pdtrace.first_token_ns"  # instant of the first token, epoch ns
TOKEN_TIMES_US = (
    "pdtrace.token.times_us"  # int array: offsets of emissions from the first one, microseconds
)
TOKEN_COUNTS = (
    "pdtrace.token.counts"  # int array: tokens of each emission; absent when each is one token
)
TOKEN_EMISSION = "pdtrace.token.emission"  # token or chunk
KV_BYTES = "pdtrace.kv.bytes"  # bytes moved by a KV transfer
KV_BACKEND = "pdtrace.kv.backend"  # NIXL, Mooncake, LMCache, ...
KV_DIRECTION = "pdtrace.kv.direction"  # prefill_to_decode, decode_to_prefill, load or store
KV_SOURCE = "pdtrace.kv.source"  # worker that the KV came from
KV_DESTINATION = "pdtrace.kv.destination"  # worker that it went to
KV_ROOM = (
    "pdtrace.kv.room"  # room in which prefill and decode worker meet (SGLang's bootstrap_room)
)
ROUTER_POLICY = "pdtrace.router.policy"
ROUTER_WORKER = "pdtrace.router.worker"  # the worker chosen
ROUTER_OVERLAP_TOKENS = "pdtrace.router.overlap_tokens"  # prompt tokens believed cached there
ROUTER_COST = "pdtrace.router.cost"
ROUTER_CANDIDATES = "pdtrace.router.candidates"

# ---- on pdtrace.steps: int arrays with one number a step, -1 for unknown; absent where nothing is known
STEP_FIRST_SEQ = (
    "pdtrace.step.first_seq"  # number of the first step, as the engine counts; the others follow
)
STEP_RANK = "pdtrace.step.rank"  # data parallel rank or engine index
STEP_OFFSETS_NS = "pdtrace.step.offsets_ns"  # start of each step after the start of the span
STEP_ELAPSED_NS = "pdtrace.step.elapsed_ns"
STEP_COUNTS = {  # column of the table steps -> attribute
    name: f"pdtrace.step.{name}"
    for name in (
        "prefill_requests", "prefill_tokens", "prefill_kv_tokens",
        "decode_requests", "decode_tokens", "decode_kv_tokens", "running", "waiting",
    )
}  # fmt: skip
STEP_KV_USAGE = "pdtrace.step.kv_usage_ratio"  # double array, 0 to 1
# Who was in a step: arrays with one entry a member.
STEP_MEMBER_IDS = "pdtrace.step.member.ids"  # string array: request ids, each once
STEP_MEMBERS = {  # what an entry says -> attribute
    name: f"pdtrace.step.member.{name}"
    for name in ("step", "request", "prefill_tokens", "decode_tokens", "context_tokens")
}
