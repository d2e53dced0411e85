"""AIPerf's scrapes of the servers' metrics as samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import orjson

from pdtrace.model import Sink

from ._common import integer, number

NO_SERIES = "scrape without series"


def add_samples(
    ordinals: list[int], objects: list[dict[str, Any]], workers: dict[str, str], out: Sink
) -> None:
    """One sample per series and scrape (histograms: sum, count); counters lack `_total` here."""
    for ordinal, scrape in zip(ordinals, objects, strict=True):
        address = urlsplit(str(scrape.get("endpoint_url", ""))).netloc
        if address and address not in workers:
            workers[address] = out.worker({"address": address})
        worker = workers.get(address)
        time_ns = integer(scrape.get("timestamp_ns"))
        rows = [
            {
                "record": ordinal,
                "worker": worker,
                "time_ns": time_ns,
                "resolution_ns": 1_000_000,
                **series,
            }
            for series in _series(scrape.get("metrics") or {})
        ]
        if rows:
            out.add("samples", rows)
        else:
            out.skip(ordinal, NO_SERIES)


def _series(metrics: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, series in metrics.items():
        for point in series if isinstance(series, list) else []:
            labels = orjson.dumps(point.get("labels") or {}, option=orjson.OPT_SORT_KEYS).decode()
            if (value := number(point.get("value"))) is not None:
                yield {"metric": name, "labels": labels, "value": value}
            for part in ("sum", "count"):
                if (value := number(point.get(part))) is not None:
                    yield {
                        "metric": f"{name}_{part}",
                        "labels": labels,
                        "value": value,
                        "kind": "histogram",
                    }
