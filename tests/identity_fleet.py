"""A store of hand-made legs, and what identity made of them."""

from __future__ import annotations

from typing import Any

from pdtrace import clocks, identity, workers
from pdtrace.store import Store

T0 = 1_790_000_000_000_000_000
MS = 1_000_000
S = 1_000_000_000


class Fleet:
    """Builds a store of hand-made legs."""

    def __init__(self) -> None:
        self.store = Store()
        self.legs: list[dict[str, Any]] = []
        self.spans: list[dict[str, Any]] = []
        self.paths: dict[str, int] = {}

    def source(self, path: str) -> int:
        if path not in self.paths:
            self.paths[path] = len(self.paths) + 1
            self.store.append("sources", [{"source": self.paths[path], "path": path}])
        return self.paths[path]

    def worker(self, worker: str, path: str = "run/traces.json", **row: Any) -> str:
        kind, _, value = worker.partition(":")
        self.store.append("workers", [{"worker": worker, **row}])
        self.store.append(
            "worker_aliases",
            [{"source": self.source(path), "worker": worker, "kind": kind, "value": value}],
        )
        return worker

    def leg(
        self,
        name: str,
        observer: str,
        worker: str | None,
        start: float | None,
        end: float | None = None,
        *,
        path: str = "run/traces.json",
        **row: Any,
    ) -> str:
        """Times in seconds after T0; `first` too."""
        first = row.pop("first", None)
        base = {
            "leg": name, "source": self.source(path), "observer": observer, "worker": worker, "container": False,
            "clock": "wall", "resolution_ns": 1, "status": "completed",
            "start_ns": None if start is None else T0 + round(start * S),
            "end_ns": None if end is None else T0 + round(end * S),
            "first_token_ns": None if first is None else T0 + round(first * S),
        }  # fmt: skip
        self.legs.append({**base, **row})
        return name

    def span(self, trace: str, span: str, parent: str | None) -> None:
        self.spans.append(
            {
                "trace_id": trace,
                "span_id": span,
                "parent_span_id": parent,
                "start_ns": T0,
                "end_ns": T0 + S,
                "name": "inner",
            }
        )

    def run(self, times: int = 1) -> Store:
        self.store.append("legs", self.legs)
        self.store.append("spans", self.spans)
        named = {leg["worker"] for leg in self.legs if leg["worker"]}
        known = set(self.store.sql("SELECT worker FROM workers")["worker"])
        for worker in sorted(named - known):
            self.store.append("workers", [{"worker": worker}])
        workers.resolve(self.store)
        for _ in range(times):
            identity.link(self.store)
            clocks.align(self.store)
            identity.build_requests(self.store)
        return self.store


def requests_of(store: Store) -> dict[str, str | None]:
    return dict(store.sql("SELECT leg, request FROM legs").iter_rows())


def deployments_of(store: Store) -> dict[str, str | None]:
    return dict(store.sql("SELECT leg, deployment FROM legs").iter_rows())


def only(store: Store, table: str = "requests") -> dict[str, Any]:
    rows = store.sql(f"FROM {table}")
    assert rows.height == 1, rows
    return rows.row(0, named=True)


def router_pd(
    fleet: Fleet, run: str, at: float, trace: str, ident: str, path: str, found: int | None = 7
) -> None:
    """One request through router, hops, P and D; span ids are the run's own, trace and request id are not."""
    r, p, d = f"instance:r{run}", f"instance:p{run}", f"instance:d{run}"
    kw: dict[str, Any] = {"trace_id": trace, "path": path}
    key = f"{run}{ident}"
    fleet.leg(
        f"R{key}",
        "router",
        r,
        at,
        at + 2,
        first=at + 0.6,
        span_id=f"r{key}",
        parent_span_id="client",
        external_id=ident,
        **kw,
    )
    fleet.leg(
        f"HP{key}",
        "router",
        r,
        at + 0.01,
        at + 0.5,
        span_id=f"hp{key}",
        parent_span_id=f"r{key}",
        container=True,
        **kw,
    )
    fleet.leg(
        f"HD{key}",
        "router",
        r,
        at + 0.51,
        at + 2,
        span_id=f"hd{key}",
        parent_span_id=f"r{key}",
        container=True,
        **kw,
    )
    fleet.leg(
        f"P{key}",
        "engine",
        p,
        at + 0.02,
        at + 0.49,
        first=at + 0.48,
        span_id=f"p{key}",
        parent_span_id=f"hp{key}",
        request_id=f"cmpl-{ident}-0",
        external_id=ident,
        output_tokens=1,
        prompt_tokens=100,
        cached_tokens=found,
        **kw,
    )
    fleet.leg(
        f"D{key}",
        "engine",
        d,
        at + 0.52,
        at + 1.9,
        first=at + 0.55,
        span_id=f"d{key}",
        parent_span_id=f"hd{key}",
        request_id=f"cmpl-{ident}-0",
        external_id=ident,
        output_tokens=51,
        prompt_tokens=100,
        cached_tokens=96,
        **kw,
    )
