"""What vLLM's scheduler does, kept as requests with their phases and as engine steps.

Fed by scheduler.py with what passes through the scheduler's public methods; knows vLLM's objects by
attribute only (vllm/v1/core/sched and vllm/v1/request.py, read in 0.8.5, 0.10.2, 0.14.1 and
0.33.0), so it
needs no vLLM to be tested. A step of the record lasts from the later of `schedule()` and the result
before it to its own result: what a stream waits for. Batches that vLLM has in flight at the same
time (asynchronous scheduling, pipeline parallelism) come back in order.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter_ns
from typing import Any

from pdtrace.instrumentation import api
from pdtrace.instrumentation.engine_steps import Step
from pdtrace.instrumentation.request_ids import of_vllm_engine
from pdtrace.instrumentation.vllm.lives import (
    Batch,
    Contexts,
    Deployment,
    Life,
    has_status,
    is_finished,
    mapping,
    reason_of,
    text,
)

_IN_FLIGHT = 64  # batches that vLLM may have under way; far more than any pipeline
_MOST_CHUNKS = 512  # prefill steps of a request that are told one by one
_SWEEP_NS = 10_000_000_000


class Book:
    """The requests and steps of one scheduler. Not for several threads: vLLM calls it from one."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.steps = api.steps(rank=deployment.rank)
        self.waiting: dict[str, Life] = {}
        self.prefilling: dict[str, Life] = {}
        self.decoding: dict[str, Life] = {}
        self.loading: dict[str, Life] = {}  # of those that wait
        self._emit: dict[str, Callable[[int], None]] = {}  # what notes a token, of plain streams
        self._batches: deque[Batch] = deque(maxlen=_IN_FLIGHT)
        self._last_result = 0
        self._swept = perf_counter_ns()

    # ---- what the scheduler tells

    def added(self, theirs: Any) -> None:
        """A request came in."""
        engine_id = theirs.request_id
        if engine_id in self.waiting or self._running(engine_id) is not None:
            return  # the next input of a streaming session
        name = of_vllm_engine(engine_id, randomised=self.deployment.randomised_ids)
        transfer = mapping(getattr(theirs, "kv_transfer_params", None))
        headers = getattr(theirs, "trace_headers", None)
        request = api.request(
            traceparent=mapping(headers).get("traceparent"),
            request_id=name.request_id,
            role=self._role(transfer),
            engine_id=engine_id,
            stream_index=name.stream,
            model=self.deployment.model,
            prompt_tokens=getattr(theirs, "num_prompt_tokens", None),
            max_tokens=getattr(theirs, "max_tokens", None),
            remote_id=text(transfer.get("remote_request_id")),
        )
        self.waiting[engine_id] = Life(theirs, request, request.start_ns)
        self._emit[engine_id] = request.stream.times.append

    def scheduled(self, scheduler: Any, output: Any, began: int) -> None:
        """`schedule()` has returned `output`; it was called at `began`."""
        if self.waiting and getattr(scheduler, "connector", None) is not None:
            self._loads_begun(perf_counter_ns())
        counts: Mapping[str, int] = output.num_scheduled_tokens
        before = Contexts(output)
        self._put_off(counts, before, began)
        if not counts:
            return
        batch = Batch(output, began, self.steps.step())
        fresh = counts.keys() & self.waiting.keys()
        chunked = counts.keys() & self.prefilling.keys() if self.prefilling else ()
        if fresh or chunked:
            self._prompts(batch, [i for i in counts if i in fresh or i in chunked], before)
        else:
            context = sum(before.contexts)
            batch.step.set(
                prefill_requests=0, prefill_tokens=0, prefill_kv_tokens=0,
                decode_requests=len(counts), decode_kv_tokens=context,
            )  # fmt: skip
        _load(batch.step, scheduler)
        self._batches.append(batch)

    def updated(self, scheduler: Any, output: Any, answers: Any, now: int) -> None:
        """The result of `output` was there at `now`; `answers` is what it made."""
        batch = self._taken(output)
        emitted = self._emitted(answers, now, batch)
        if batch is not None:
            batch.step.set(decode_tokens=emitted)
            self.steps.add(batch.step, now)
        self._last_result = now
        if self.loading:
            self._loads_ended(scheduler)
        if now - self._swept > _SWEEP_NS:
            self._swept = now
            self._sweep(scheduler)
        if not (self.decoding or self.prefilling or self.waiting):
            self.steps.flush()

    def finished(self, engine_ids: Iterable[str] | None, status: Any) -> None:
        """vLLM ended these requests (all of them where None) from outside: an abort, an error."""
        if engine_ids is None:
            engine_ids = [*self.waiting, *self.prefilling, *self.decoding]
        reason = reason_of(status)
        for engine_id in engine_ids:
            life = self._lookup(engine_id)
            if life is None or not is_finished(life.theirs):
                continue
            # vLLM's front end ends what met a stop string in the same way as what a client left.
            stops = getattr(getattr(life.theirs, "sampling_params", None), "stop", None)
            unclear = reason == "abort" and bool(stops)
            self._end(life, "abort_or_stop" if unclear else reason)

    def closed(self) -> None:
        """The engine goes down: what is under way is over."""
        for life in [*self.waiting.values(), *self.prefilling.values(), *self.decoding.values()]:
            self._end(life, "abort")
        self.steps.flush()
        api.flush(timeout_s=2.0)

    def forget(self) -> None:
        """Recording broke: what is under way is not told, rather than told wrongly."""
        for life in [*self.waiting.values(), *self.prefilling.values(), *self.decoding.values()]:
            life.request.ended = True
        for kept in (self.waiting, self.prefilling, self.decoding, self.loading, self._emit):
            kept.clear()
        self._batches.clear()

    # ---- a batch

    def _prompts(self, batch: Batch, engine_ids: list[str], before: Contexts) -> None:
        """A batch with prompts in it: who they are, and who decodes beside them."""
        step, pulled = batch.step, 0
        prefill_tokens = prefill_context = pulled_context = 0
        for engine_id in engine_ids:
            life = self.waiting.pop(engine_id, None) or self.prefilling.pop(engine_id)
            start, count = before.of(engine_id), batch.output.num_scheduled_tokens[engine_id]
            if life.target == 0:
                self._admitted(life, start)
            if life.pulled and start >= life.target - 1:
                pulled += 1
                pulled_context += start
                batch.pulled.append(life)
                step.member(engine_id, decode_tokens=1, context_tokens=start)
            else:
                tokens = min(count, max(life.target - start, 1))
                detail = "prefill_recompute" if life.stream.times else "prefill_exec"
                batch.prefills.append((life, tokens, detail))
                prefill_tokens += tokens
                prefill_context += start
                step.member(engine_id, prefill_tokens=tokens, context_tokens=start)
            self.loading.pop(engine_id, None)
            done = start + count >= life.target
            (self.decoding if done else self.prefilling)[engine_id] = life
        ids, contexts = before.known
        without = set(engine_ids)
        step.decoded(ids, contexts, without)
        known = sum(before.of(i) for i in engine_ids if i not in before.fresh)
        step.set(
            prefill_requests=len(batch.prefills), prefill_tokens=prefill_tokens, prefill_kv_tokens=prefill_context,
            decode_requests=len(batch.output.num_scheduled_tokens) - len(engine_ids) + pulled,
            decode_kv_tokens=sum(contexts) - known + pulled_context,
        )  # fmt: skip

    def _admitted(self, life: Life, start: int) -> None:
        """A waiting request enters the batch: how far its prompt has to be computed."""
        theirs = life.theirs
        prompt = getattr(theirs, "num_prompt_tokens", 0)
        life.target = max(prompt, getattr(theirs, "num_tokens", prompt))
        remote = bool(life.loading) and self._remote(theirs)
        life.pulled = remote and bool(life.loaded)
        if not life.stream.times and not remote:
            life.request.attributes.setdefault("cached_tokens", start)

    def _put_off(self, counts: Mapping[str, int], before: Contexts, now: int) -> None:
        """Requests that were running and are preempted, for the next steps or begun anew in this one."""
        for engine_id in before.resumed:
            life = self.prefilling.pop(engine_id, None) or self.decoding.pop(engine_id, None)
            if life is not None:
                self._preempted(life, now)
        running = len(self.prefilling) + len(self.decoding)
        if running + len(counts.keys() & self.waiting.keys()) <= len(counts):
            return
        for kept in (self.prefilling, self.decoding):
            for engine_id in [i for i in kept if i not in counts]:
                if has_status(kept[engine_id].theirs, "PREEMPTED"):
                    self._preempted(kept.pop(engine_id), now)

    def _preempted(self, life: Life, now: int) -> None:
        life.waits("preempted" if life.stream.times else "prefill_queue", now)
        life.target = life.loading = life.loaded = 0
        life.pulled = False
        attributes = life.request.attributes
        attributes["preemptions"] = attributes.get("preemptions", 0) + 1
        self.waiting[life.engine_id] = life

    def _taken(self, output: Any) -> Batch | None:
        """The batch that has come back, with its step's start and the phases that it ends and holds."""
        while self._batches and self._batches[0].output is not output:
            if not any(batch.output is output for batch in self._batches):
                return None  # an empty one, or one that was scheduled before we looked
            self._batches.popleft()  # never came back
        return self._batches.popleft() if self._batches else None

    def _emitted(self, answers: Any, now: int, batch: Batch | None) -> int:
        """Tokens and ends of requests; how many tokens came from decoding requests."""
        prompts: list[Life] = []
        if batch is not None:
            batch.step.start_ns = max(batch.began, self._last_result)
            prompts = [life for life, *_ in batch.prefills]
            self._worked(batch, now)
        before = sum(life.output_tokens for life in prompts)
        made, get = 0, self._emit.get
        for group in answers.values() if isinstance(answers, Mapping) else (answers,):
            for answer in getattr(group, "outputs", ()):
                # For every token of the engine: the usual case in few steps.
                if answer.finish_reason is None and len(answer.new_token_ids) == 1:
                    emit = get(answer.request_id)
                    if emit is not None:
                        emit(now)
                        made += 1
                        continue
                made += self._answered(answer, now)
        return made - (sum(life.output_tokens for life in prompts) - before)

    def _answered(self, answer: Any, now: int) -> int:
        """Several tokens at once, none, or the end of a request; the number of tokens."""
        life = self._lookup(answer.request_id)
        if life is None:
            return 0
        count = len(answer.new_token_ids)
        if count:
            life.stream.at(now, count)
        if life.stream.counts is not None:
            self._emit.pop(life.engine_id, None)
        if answer.finish_reason is not None:
            self._end(life, str(answer.finish_reason).lower())
        return count

    def _worked(self, batch: Batch, now: int) -> None:
        """The batch's work on prompts as phases of their requests."""
        start = batch.step.start_ns
        for life, tokens, detail in batch.prefills:
            if life.request.ended:
                continue
            life.goes_on(start)
            life.first_chunk = life.first_chunk or start
            life.last_chunk = now
            life.chunks += 1
            if life.chunks <= _MOST_CHUNKS:
                life.request.mark(detail, start, now, tokens=tokens)
        for life in batch.pulled:
            if not life.request.ended:
                life.goes_on(start)
                life.request.mark("decode_exec", start, now)

    # ---- KV from elsewhere

    def _loads_begun(self, now: int) -> None:
        for engine_id, life in self.waiting.items():
            if not life.loading and has_status(life.theirs, "WAITING_FOR_REMOTE_KVS"):
                if self._remote(life.theirs) and life.wait == "prefill_queue":
                    life.wait = "bridge_wait"
                life.goes_on(now)
                life.loading = now
                self.loading[engine_id] = life

    def _loads_ended(self, scheduler: Any) -> None:
        arrived = getattr(scheduler, "finished_recving_kv_req_ids", None)
        if not arrived:
            return
        failed = getattr(scheduler, "failed_recving_kv_req_ids", ())
        for engine_id in [i for i in self.loading if i in arrived]:
            life, now = self.loading.pop(engine_id), perf_counter_ns()
            self._loaded(life, now, "kv_load_failed" if engine_id in failed else None)
            life.loaded = 0 if engine_id in failed else now
            pulled = life.loaded and self._remote(life.theirs)
            life.waits("decode_queue" if pulled else "prefill_queue", now)

    def _loaded(self, life: Life, now: int, error: str | None) -> None:
        transfer = mapping(getattr(life.theirs, "kv_transfer_params", None))
        remote = self._remote(life.theirs)
        attributes = {
            "backend": self.deployment.connector,
            "direction": "prefill_to_decode" if remote else "load",
            "source": text(transfer.get("remote_engine_id")),
        }
        name = "kv_transfer" if remote else "kv_load"
        life.request.phases.append((name, life.loading, now, attributes, error))

    def _remote(self, theirs: Any) -> bool:
        """Whether a request's KV comes from a prefill worker, not from a cache tier."""
        transfer = mapping(getattr(theirs, "kv_transfer_params", None))
        return bool(transfer.get("do_remote_prefill")) or self.deployment.consumer

    def _role(self, transfer: Mapping[str, Any]) -> str:
        told = os.environ.get("PDTRACE_ROLE")
        if told in ("prefill", "decode", "aggregated"):
            return told
        if transfer.get("do_remote_decode"):
            return "prefill"
        if transfer.get("do_remote_prefill"):
            return "decode"
        return self.deployment.role

    # ---- the end

    def _sweep(self, scheduler: Any) -> None:
        """Requests that vLLM forgot without telling: their end is not known, but they take no more memory."""
        known = getattr(scheduler, "requests", None)
        if known is None:
            return
        for kept in (self.waiting, self.prefilling, self.decoding):
            for engine_id in [i for i in kept if i not in known]:
                self._end(kept[engine_id], "unknown")

    def _running(self, engine_id: str) -> Life | None:
        return self.decoding.get(engine_id) or self.prefilling.get(engine_id)

    def _lookup(self, engine_id: str) -> Life | None:
        return self._running(engine_id) or self.waiting.get(engine_id)

    def _end(self, life: Life, reason: str) -> None:
        for kept in (self.decoding, self.prefilling, self.waiting, self.loading, self._emit):
            kept.pop(life.engine_id, None)
        request, now = life.request, perf_counter_ns()
        if life.loading and not life.loaded and life.since == 0 and not life.chunks:
            self._loaded(life, now, "aborted")  # it was still under way
        life.goes_on(now)
        if life.last_chunk > life.first_chunk and life.chunks > 1:
            request.mark("prefill_gap", life.first_chunk, life.last_chunk)
        times = life.stream.times
        if len(times) > 1:
            request.mark("decode", times[0], times[-1])
        request.set(finish_reasons=[reason], output_tokens=life.output_tokens)
        request.end("engine_error" if reason == "error" else None, aborted=reason == "abort")


def _load(step: Step, scheduler: Any) -> None:
    """How full the engine is; what this version does not tell stays unknown."""
    with contextlib.suppress(Exception):
        counts = getattr(scheduler, "get_request_counts", None)  # since 0.9
        running, waiting = counts() if counts else (len(scheduler.running), len(scheduler.waiting))
        step.set(running=running, waiting=waiting)
    with contextlib.suppress(Exception):
        step.set(kv_usage_ratio=float(scheduler.kv_cache_manager.usage))
