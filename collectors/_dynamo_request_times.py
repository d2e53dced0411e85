"""Instants of one request, laid out from the milliseconds of Dynamo's request trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ._common import integer, number
from ._dynamo_names import TTFT_AGGREGATED

MS = 1_000_000
_MOST_MS = 9.2e12  # nanoseconds of more do not fit into 64 bits


class Times:
    """The instants of one request, laid out from request_received_ms (milliseconds)."""

    def __init__(self, request: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        worker = request.get("worker") or {}
        self.prefill_worker = text(worker.get("prefill_worker_id"))
        self.decode_worker = text(worker.get("decode_worker_id"))
        self.prefill_rank = text(worker.get("prefill_dp_rank"))
        self.decode_rank = text(worker.get("decode_dp_rank"))
        self.apart = bool(
            self.prefill_worker and self.decode_worker and self.prefill_worker != self.decode_worker
        )
        total = number(request.get("total_time_ms"))
        ended = epoch_ms(event.get("event_time_unix_ms"))
        self.start = epoch_ms(request.get("request_received_ms"))
        if self.start is None and ended is not None and total is not None:
            self.start = _after(ended, -total)
        self.end = _after(self.start, total)
        if self.end is None:
            self.end = ended
        wait, prefill = (
            number(request.get("prefill_wait_time_ms")),
            number(request.get("prefill_time_ms")),
        )
        self.dispatched = _after(self.start, wait)
        self.prefill_end = _after(self.dispatched, prefill)
        self.ttft_ms = number(request.get("ttft_ms"))
        self.total_ms = total
        handover = number(request.get("kv_transfer_estimated_latency_ms"))
        # Side by side (bootstrap) it is not measured and stands as 0.0.
        self.decode_start = _after(self.prefill_end, handover) if handover else None

    def workers(self) -> list[tuple[str, str, str | None]]:
        """(role, worker id, its data-parallel rank) of the workers that served the request."""
        if self.apart:
            return [
                ("prefill", str(self.prefill_worker), self.prefill_rank),
                ("decode", str(self.decode_worker), self.decode_rank),
            ]
        one = self.prefill_worker or self.decode_worker
        ranks = {rank for rank in (self.prefill_rank, self.decode_rank) if rank is not None}
        # a prompt computed on another rank than its answer is no work of one rank
        return [("aggregated", one, ranks.pop() if len(ranks) == 1 else None)] if one else []

    def of_leg(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Instants and durations of the frontend's leg; no TTFT where P and D are apart."""
        output = integer(request.get("output_tokens"))
        first_ms = None if self.apart else self.ttft_ms
        tpot = None
        if first_ms is not None and self.total_ms is not None and output is not None and output > 1:
            tpot = (self.total_ms - first_ms) / (output - 1)
        return {
            "clock": "wall", "start_ns": self.start, "end_ns": self.end, "resolution_ns": MS,
            "first_token_ns": _after(self.start, first_ms), "ttft_ms": first_ms,
            "e2e_ms": self.total_ms,
            "tpot_ms": tpot, "ttft_definition": None if first_ms is None else TTFT_AGGREGATED,
            "first_token_delivered": None if first_ms is None else True,
            "status": "completed" if output else "unknown",
        }  # fmt: skip

    def of_worker(self, role: str) -> dict[str, Any]:
        """Instants of a worker's leg as far as the frontend knows them; the decode side's start
        is its earliest."""
        if role == "decode":
            first = self.prefill_end if self.decode_start is not None else self.dispatched
            return {"start_ns": first, "first_token_ns": self.decode_start, "end_ns": self.end}
        end = self.prefill_end if role == "prefill" else self.end
        return {
            "start_ns": self.dispatched, "first_token_ns": self.prefill_end, "end_ns": end,
            "first_token_delivered": False if role == "prefill" else None,
        }  # fmt: skip

    def intervals(self) -> Iterator[tuple[str, int, int, str, str]]:
        """(detail, start, end, basis, semantics) of what the record places."""
        prefill = "dispatch to the first output of the prefill worker: contains the engine's queue"
        handover = "prefill result to first decode token: KV transfer, dispatch and one decode pass"
        if self.dispatched is not None and self.prefill_end is not None:
            yield ("prefill_wall", self.dispatched, self.prefill_end, "placed", prefill)
        if self.apart and self.prefill_end is not None and self.decode_start is not None:
            yield (
                "kv_wait_upper_bound",
                self.prefill_end,
                self.decode_start,
                "upper_bound",
                handover,
            )
        first = self.decode_start if self.apart else self.prefill_end
        if first is not None and self.end is not None:
            yield (
                "decode_wall",
                first,
                self.end,
                "placed",
                "first output to the end of the request",
            )


def text(value: object) -> str | None:
    """A value as text; None for nothing."""
    return None if value is None or value == "" else str(value)


def epoch_ms(value: object) -> int | None:
    """Epoch milliseconds as nanoseconds."""
    found = number(value)
    if found is None:
        return None
    return integer(int(found) * MS if found.is_integer() else round(found * MS))


def _after(start: int | None, ms: float | None) -> int | None:
    return (
        None
        if start is None or ms is None or abs(ms) > _MOST_MS
        else integer(start + round(ms * MS))
    )
