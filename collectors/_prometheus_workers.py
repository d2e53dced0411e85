"""Whom a sample describes: the server that was scraped, or the worker that its labels name."""

from __future__ import annotations

import json
import re

import polars as pl

from pdtrace.model import Sink, Source

from ._llmd_names import ADDRESS, POD
from ._llmd_names import ENGINE as LLM_D

_LABEL = re.compile(r'([A-Za-z_][\w.]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_HEX_ID = re.compile(r"[0-9a-f]{1,16}")
_START = "process_start_time_seconds"
_RECENT_S = 1e9  # an instant, not a count
FRONTEND = "dynamo_frontend_"
_OWN = "dynamo_component_"  # the process that emits it carries its own id in hexadecimal
CACHE_CONFIG = "vllm:cache_config_info"
# Of a vLLM server with NIXL: who pulled KV and made many tokens decodes; who pulled none and made one a request prefills.
_PULLED = "vllm:nixl_xfer_time_seconds_count"
_MADE, _FINISHED = "vllm:generation_tokens_total", "vllm:request_success_total"
_CACHE_FACTS = {
    "block_size": "block_size",
    "num_gpu_blocks": "kv_cache_blocks",
    "kv_cache_size_tokens": "kv_cache_tokens",
    "cache_dtype": "kv_cache_dtype",
    "enable_prefix_caching": "prefix_caching",
    "gpu_memory_utilization": "gpu_memory_utilization",
}
_ENGINES = (
    ("dynamo_", "Dynamo"),
    ("vllm:", "vLLM"),
    ("sglang:", "SGLang"),
    ("trtllm", "TensorRT-LLM"),
    ("smg_", "smg"),
    # llm-d's endpoint picker, under the names of its releases
    *((prefix, LLM_D) for prefix in (
        "llm_d_epp_", "llm_d_router_epp_", "llm_d_inference_scheduler_", "inference_extension_", "inference_objective_",
        "inference_model_", "inference_pool_",
    )),
    # TensorRT-LLM's disaggregated server counts by kind of worker and has no prefix
    ("ctx_first_token_latency_seconds", "TensorRT-LLM"),
    ("gen_first_token_latency_seconds", "TensorRT-LLM"),
)  # fmt: skip
_TRTLLM_ROUTER = r"^(?:ctx|gen)_(?:first_token|complete|per_token)_latency_seconds"
# What a picker says of each pod of its pool.
_PER_POD = r"per_(?:pod|endpoint)_"
_POD_LABELS = ("model_server_endpoint", "model_server_pod")


def labels_of(text: str | None) -> dict[str, str]:
    """The labels between the braces."""
    if not text:
        return {}
    found = {}
    for name, value in _LABEL.findall(text):
        found[name] = (
            re.sub(r'\\[n"\\]', lambda m: _ESCAPES[m[0]], value) if "\\" in value else value
        )
    return found


def _process(samples: pl.DataFrame) -> str | None:
    """What no two processes share: when one started, and when its client library made its first metric.

    Processes of one script start within the 10 ms to which the start is known; `_created` (prometheus_client,
    OpenMetrics) is finer. Without either: None.
    """
    metric, value = pl.col("metric"), pl.col("value_text").cast(pl.Float64, strict=False)
    start = samples.filter((metric == _START) & (pl.col("labels_text") == ""))["value_text"]
    made = samples.filter(metric.str.ends_with("_created") & (value > _RECENT_S)).select(
        pl.col("value_text").sort_by(value).first()
    )["value_text"]
    if start.n_unique() != 1 or not len(made) or made[0] is None:
        return None
    return f"{start[0]}/{made[0]}"


class Describer:
    """Gives the samples of one dump their labels as JSON and their worker."""

    def __init__(self, source: Source, out: Sink) -> None:
        self._path = source.path
        self._out = out
        self._labels: dict[str, dict[str, str]] = {"": {}}
        self._others: dict[tuple[str, str], str] = {}  # workers named by labels
        self._own = ""
        self._role: str | None = None
        self._basis: str | None = None
        self._engine: str | None = None
        self._aliases: dict[str, str | None] = {}
        self._facts: set[tuple[str, str, str]] = set()
        self._window: dict[str, tuple[int, int]] = {}
        self._totals: dict[
            tuple[str, str], float
        ] = {}  # series of the counters above -> largest value

    def describe(self, samples: pl.DataFrame) -> pl.DataFrame:
        """The samples with labels, value and worker."""
        samples = samples.with_columns(pl.col("labels_text").fill_null(""))
        pairs = samples.select("metric", "labels_text").unique()
        for text in pairs["labels_text"].unique().to_list():
            if text not in self._labels:
                self._labels[text] = labels_of(text)
        if not self._own:
            self._own = self._scraped(pairs, _process(samples))
        self._state(samples)
        names = pairs.with_columns(
            pl.Series(
                "labels",
                [
                    json.dumps(self._labels[t], sort_keys=True, ensure_ascii=False)
                    for t in pairs["labels_text"]
                ],
            ),
            pl.Series("worker", [self._worker(m, self._labels[t]) for m, t in pairs.iter_rows()]),
        )
        value = pl.col("value_text").str.replace("(?i)^nan$", "").cast(pl.Float64, strict=False)
        rows = samples.join(
            names, on=["metric", "labels_text"], how="left", maintain_order="left"
        ).with_columns(pl.when(value.is_finite()).then(value).alias("value"))
        self._count(rows)
        spans = rows.group_by("worker").agg(
            pl.col("time_ns").min().alias("a"), pl.col("time_ns").max().alias("b")
        )
        for worker, first, last in spans.iter_rows():
            if first is not None:
                low, high = self._window.get(worker, (first, last))
                self._window[worker] = (min(low, first), max(high, last))
        return rows

    def close(self) -> None:
        """Say when the scraped server was seen, and what its counters say that it does."""
        side = self._side()
        if self._own and side and not self._role:
            self._role, self._basis = side, "log"
            self._out.worker(self._aliases, engine=self._engine, role=side, role_basis="log")
        if self._own and self._own in self._window:
            first, last = self._window[self._own]
            self._out.worker(
                self._aliases,
                engine=self._engine,
                role=self._role,
                role_basis=self._basis,
                start_ns=first,
                end_ns=last,
            )

    def _side(self) -> str | None:
        """Prefill or decode, where the counters of a NIXL pair leave no other choice."""
        sums: dict[str, float] = {}
        for (metric, _), value in self._totals.items():
            sums[metric] = sums.get(metric, 0.0) + value
        if _PULLED not in sums or not sums.get(_FINISHED):
            return None
        one_each = sums.get(_MADE) == sums[_FINISHED]
        if one_each == (sums[_PULLED] > 0):  # pulled for one token, or made many of its own prompts
            return None
        return "prefill" if one_each else "decode"

    def _count(self, rows: pl.DataFrame) -> None:
        told = rows.filter(pl.col("metric").is_in([_PULLED, _MADE, _FINISHED]))
        largest = told.group_by("metric", "labels").agg(pl.col("value").max()).drop_nulls()
        for metric, labels, value in largest.iter_rows():
            self._totals[metric, labels] = max(value, self._totals.get((metric, labels), value))

    def _scraped(self, pairs: pl.DataFrame, process: str | None) -> str:
        """Declare the server that was scraped."""
        metrics = pairs["metric"]
        own_ids = {
            labels["worker_id"]
            for metric, text in pairs.filter(metrics.str.starts_with(_OWN)).iter_rows()
            if _HEX_ID.fullmatch((labels := self._labels[text]).get("worker_id", ""))
        }
        agents = {
            self._labels[t].get("agent_name")
            for m, t in pairs.iter_rows()
            if m.startswith("agent_")
        } - {None}
        self._engine = next(
            (name for prefix, name in _ENGINES if metrics.str.starts_with(prefix).any()), None
        )
        components = {
            self._labels[t].get("dynamo_component")
            for m, t in pairs.iter_rows()
            if m.startswith(_OWN)
        }
        self._role = (
            "prefill" if components == {"prefill"} else None
        )  # "backend" decodes or does both
        if metrics.str.starts_with(FRONTEND).any():
            self._role = "frontend"
        elif self._engine == "smg" or metrics.str.contains(_TRTLLM_ROUTER).any():
            self._role = "router"
        elif self._engine == LLM_D:
            self._role = "gateway"
        self._basis = "log" if self._role else None
        agent = agents.pop() if len(agents) == 1 else None
        self._aliases = {
            "engine_id": agent if agent and re.fullmatch(r"[0-9a-f-]{32,36}", agent) else None,
            "worker_id": str(int(own_ids.pop(), 16)) if len(own_ids) == 1 else None,
            "file": self._path,
            "process": process,
        }
        return self._out.worker(
            self._aliases, engine=self._engine, role=self._role, role_basis=self._basis
        )

    def _worker(self, metric: str, labels: dict[str, str]) -> str:
        """The worker that a series describes."""
        named = labels.get("worker_id")
        if named and metric.startswith("dynamo_"):
            if metric.startswith(FRONTEND) or len(named) > 16:
                role = "prefill" if labels.get("worker_type") == "prefill" else None
                return self._other("worker_id", named, role) if named.isdigit() else self._own
            if _HEX_ID.fullmatch(named):
                decimal = str(int(named, 16))
                return (
                    self._own
                    if self._aliases["worker_id"] == decimal
                    else self._other("worker_id", decimal)
                )
        if self._engine == LLM_D and re.search(_PER_POD, metric):
            pod = next((labels[name] for name in _POD_LABELS if labels.get(name)), "")
            if re.match(ADDRESS, pod):
                return self._other("address", pod)
            if found := re.match(POD, pod):
                return self._other("pod", found[1])
        # what a Prometheus server adds when it is asked for everybody's series
        if "job" in labels and labels.get("pod"):
            return self._other("pod", labels["pod"])
        if "job" in labels and re.fullmatch(r"[\w.\[\]:-]+:\d+", labels.get("instance", "")):
            return self._other("address", labels["instance"])
        return self._own

    def _other(self, kind: str, value: str, role: str | None = None) -> str:
        if (kind, value) not in self._others:
            basis = "log" if role else None
            self._others[kind, value] = self._out.worker({kind: value}, role=role, role_basis=basis)
        return self._others[kind, value]

    def _state(self, samples: pl.DataFrame) -> None:
        """Facts that the samples state."""
        start = samples.filter((pl.col("metric") == _START) & (pl.col("labels_text") == ""))
        for value in start["value_text"].unique().to_list():
            self._fact("process_start_time_s", f"{float(value):.3f}")
        infos = samples.filter(pl.col("metric").is_in([CACHE_CONFIG, "vllm_cache_config_info"]))
        for text in infos["labels_text"].unique().to_list():
            labels = self._labels[text]
            for label, key in _CACHE_FACTS.items():
                if labels.get(label) not in (None, "", "None"):
                    self._fact(key, labels[label])
            blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
            if "kv_cache_size_tokens" not in labels and blocks.isdecimal() and size.isdecimal():
                self._fact("kv_cache_tokens", str(int(blocks) * int(size)))
        named = (
            samples.filter(pl.col("metric").str.starts_with("vllm:"))["labels_text"]
            .unique()
            .to_list()
        )
        for model in {self._labels[text].get("model_name") for text in named} - {None}:
            self._fact("served_model_name", str(model))

    def _fact(self, key: str, value: str) -> None:
        if (self._own, key, value) not in self._facts:
            self._facts.add((self._own, key, value))
            self._out.fact(self._own, key, value)
