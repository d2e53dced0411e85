"""Metrics of llm-d's endpoint picker and of TensorRT-LLM's disaggregated server are told by name, with the right worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pdtrace import registry

PROMETHEUS = registry.collectors()["prometheus"]
Collect = Callable[..., Any]

PAGES = {
    "0.10": """# TYPE llm_d_epp_request_total counter
llm_d_epp_request_total{model_name="m",target_model_name="m"} 12
llm_d_epp_flow_control_queue_size{fairness_id="d",priority="0"} 3
llm_d_epp_per_endpoint_queue_size{name="pool",model_server_endpoint="decode-7f9b5d6c8-q8k2m-rank-0"} 5
""",
    "before": """# TYPE inference_objective_request_total counter
inference_objective_request_total{model_name="m",target_model_name="m"} 12
inference_extension_flow_control_queue_size{priority="0"} 3
inference_pool_per_pod_queue_size{name="pool",model_server_pod="decode-7f9b5d6c8-q8k2m"} 5
""",
}


@pytest.mark.parametrize("release", PAGES)
def test_a_pickers_page_is_the_gateways_and_what_it_says_of_pods_is_theirs(
    collect: Collect, tmp_path: Path, release: str
) -> None:
    (tmp_path / "epp.prom").write_text(f"# scrape_ts 1796000000.5\n{PAGES[release]}")
    got = collect(PROMETHEUS, tmp_path / "epp.prom")
    own = got["workers"].filter(pl.col("worker").str.starts_with("file:"))
    assert own.select("engine", "role").unique().rows() == [("llm-d", "gateway")]
    of = dict(got["samples"].select("value", "worker").iter_rows())
    assert of[5.0] == "pod:decode-7f9b5d6c8-q8k2m"
    assert of[3.0].startswith("file:")


def test_the_disaggregated_servers_page_is_a_routers(collect: Collect, tmp_path: Path) -> None:
    text = "".join(f"# TYPE {kind}_first_token_latency_seconds histogram\n{kind}_first_token_latency_seconds_sum 1.5\n{kind}_first_token_latency_seconds_count 3\n" for kind in ("ctx", "gen"))  # fmt: skip
    (tmp_path / "disagg.prom").write_text(f"# scrape_ts 1796000000.5\n{text}total_requests_total 3\n")  # fmt: skip
    got = collect(PROMETHEUS, tmp_path / "disagg.prom")["workers"]
    assert got.select("engine", "role").unique().rows() == [("TensorRT-LLM", "router")]
