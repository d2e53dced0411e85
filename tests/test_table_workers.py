"""A table of requests with a worker column: one deployment, each request once, its worker known."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace.ingest import ingest
from pdtrace.store import Store


def ingested(path: Path, text: str) -> Store:
    path.write_text(text)
    store = Store()
    ingest([str(path)], store)
    return store


def rows(names: tuple[str, str], ids: bool = True) -> str:
    lines = [f"{'id,' if ids else ''}worker,arrival,ttft_ms,e2e_ms,input_tokens,output_tokens"]
    for n in range(20):
        key = f"req-{n:04d}," if ids else ""
        lines.append(f"{key}{names[n % 2]},2026-01-01T00:00:{n:02d}Z,100,2000,500,100")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("names", [("w1", "w2"), ("145551234567891", "145551234567892")])
def test_a_worker_column_doubles_no_request_and_splits_no_table(
    tmp_path: Path, names: tuple[str, str], ids: bool
) -> None:
    store = ingested(tmp_path / "requests.csv", rows(names, ids))
    assert store.count("deployments") == 1
    found = store.sql("FROM requests")
    assert found.height == 20
    assert found["decode_worker"].n_unique() == 2
    assert found["decode_worker"].null_count() + found["first_token_ns"].null_count() == 0
    assert store.sql("SELECT DISTINCT rule FROM identity_edges").item() == "same_row"


def test_two_tables_stay_two_deployments(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text(rows(("w1", "w2"), ids=False))
    store = ingested(tmp_path / "a.csv", rows(("w1", "w2"), ids=False))
    assert store.count("deployments") == 1
    both = Store()
    (tmp_path / "b.csv").write_text(rows(("w1", "w2"), ids=False).replace(":00:", ":01:"))
    ingest([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], both)
    assert both.sql("SELECT deployment, count(*) AS n FROM requests GROUP BY 1")["n"].to_list() == [
        20,
        20,
    ]
