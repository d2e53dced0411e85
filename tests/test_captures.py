"""The diagnosis is true on real captures together and in other clothes: cut ones everywhere, the full ones where they lie beside the checkout."""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from captures_read import CUTS, DEMO, DYNAMO, FULL, VLLM, Run, balanced, exact_partition, full, read


@pytest.fixture(scope="session", autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    read.cache_clear()


def comparable(run: Run) -> dict[str, pl.DataFrame]:
    """Requests, phases and legs without what names files."""
    by_path = {"source", "record", "leg", "worker", "deployment", "prefill_worker", "decode_worker"}
    tables = {}
    for name in ("requests", "phases", "legs", "intervals", "steps", "decisions", "events"):
        frame = run.store.sql(f"FROM {name}")
        # Ids made of a path change with the path; all others must not.
        frame = frame.drop(list(by_path & set(frame.columns))).drop(
            [c for c in ("router", "clock") if c in frame.columns]
        )
        if "request" in frame.columns:  # a line without any id is named by its file
            frame = frame.with_columns(pl.col("request").str.replace("^.*#", "#"))
        tables[name] = frame.sort(frame.columns, nulls_last=True)
    return tables


def same_tables(a: Run, b: Run) -> None:
    left, right = comparable(a), comparable(b)
    for name, frame in left.items():
        assert frame.equals(right[name]), name


def all_runs() -> list[Any]:
    cuts = tuple(sorted(p for p in CUTS.iterdir() if p.is_dir()))
    return [
        pytest.param((*cuts, DEMO), 6, id="cut"),
        pytest.param((VLLM, DYNAMO), 6, id="full", marks=full),
    ]


def _home(path: str) -> str:
    """Which run a file belongs to."""
    name = next(
        (
            n
            for n in (
                "pd_nixl",
                "pd_doors",
                "edge",
                "disagg_bootstrap",
                "aiperf_disagg",
                "unified_backend",
            )
            if f"/{n}/" in path
        ),
        None,
    )
    if name is None:
        name = "vllm" if "/demo/" in path or "/vllm/agg/" in path else "dynamo_agg"
    return "pd_nixl" if name == "edge" else name


@pytest.mark.parametrize(("paths", "deployments"), all_runs())
def test_all_captures_in_one_call_do_not_mix(paths: tuple[Path, ...], deployments: int) -> None:
    run = read(*paths)
    assert len(run.said.deployments) == deployments
    homes: dict[str, set[str]] = {}
    for deployment, path in run.store.rows(
        "SELECT DISTINCT l.deployment, s.path FROM legs l JOIN sources s USING (source) WHERE l.request IS NOT NULL"
    ):
        homes.setdefault(deployment, set()).add(_home(path))
    assert all(len(names) == 1 for names in homes.values()), homes
    assert len({next(iter(names)) for names in homes.values()}) == deployments
    # No request is in two deployments, nor made of files of two runs.
    assert run.value("SELECT count(*) FROM (SELECT request FROM legs WHERE request IS NOT NULL GROUP BY request HAVING count(DISTINCT deployment) > 1)") == 0  # fmt: skip
    exact_partition(run)
    balanced(run)


@pytest.mark.parametrize(("paths", "deployments"), all_runs())
def test_no_prompt_and_no_answer_enters_the_store(
    paths: tuple[Path, ...], deployments: int
) -> None:
    del deployments
    run = read(*paths)
    words = secrets(paths)
    assert words or FULL not in (path.parent for path in paths)
    text = re.compile("|".join(re.escape(word) for word in words)) if words else None
    for table, column, kind in run.store.rows(
        "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal AND data_type LIKE '%VARCHAR%'"
    ):
        del kind
        if text is None:
            break
        rows = run.store.sql(
            f"SELECT DISTINCT CAST({column} AS VARCHAR) AS v FROM {table} WHERE regexp_matches(CAST({column} AS VARCHAR), $p)",
            p=text.pattern,
        )
        assert rows.height == 0, (table, column, rows["v"][0][:80])


def secrets(paths: tuple[Path, ...]) -> list[str]:
    """Fragments of prompts and answers that stand in the files that were read."""
    found: set[str] = set()
    for path in (
        p for folder in paths for p in ([folder] if folder.is_file() else sorted(folder.rglob("*")))
    ):
        if path.is_file() and re.search(
            r"bench_.*json|\.sse|inputs\.json|raw\.jsonl|batch\.json|unsampled", path.name
        ):
            opener = gzip.open if path.suffix == ".gz" else open
            with opener(path, "rt", errors="replace") as stream:
                for n, (_, said) in enumerate(_SAID.findall(stream.read())):
                    middle = said[len(said) // 3 : len(said) // 3 + 24]
                    if len(middle) == 24 and "\\" not in middle:
                        found.add(middle)
                    if n > 400:
                        break
    return sorted(found)[:400]


_SAID = re.compile(r'"(generated_texts|text|content|prompt)": ?\[?\s*"((?:[^"\\]|\\.){40,})"')


def twice_runs() -> list[Any]:
    return [
        pytest.param(CUTS / "edge", id="edge"),
        pytest.param(CUTS / "disagg_bootstrap", id="disagg_bootstrap"),
        pytest.param(CUTS / "aiperf_disagg", id="aiperf_disagg"),
        pytest.param(CUTS / "pd_nixl", id="pd_nixl"),
    ]


@pytest.mark.parametrize("folder", twice_runs())
def test_reading_twice_or_in_another_order_changes_nothing(folder: Path, tmp_path: Path) -> None:
    once = read(folder)
    copy = tmp_path / "copy" / folder.name
    shutil.copytree(folder, copy)
    doubled = Run([folder, folder, copy])
    same_tables(once, doubled)
    balanced(doubled)
    # Names that turn the order of the paths round.
    turned = tmp_path / "turned" / folder.name
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "ORIGIN")
    for n, path in enumerate(reversed(files)):
        target = turned / f"{n:02d}-{path.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    same_tables(once, Run([turned]))


@pytest.mark.parametrize(
    ("folder", "json_lines", "protobuf"),
    [
        pytest.param(
            VLLM / "pd_nixl",
            "pd.traces.otlp.jsonl.gz",
            "pd.traces.otlp.bin.gz",
            id="vllm",
            marks=full,
        ),
        pytest.param(
            DYNAMO / "agg", "otlp_traces.jsonl.gz", "otlp_traces.pb.gz", id="dynamo", marks=full
        ),
    ],
)
def test_protobuf_and_json_copies_count_once(folder: Path, json_lines: str, protobuf: str) -> None:
    left, right, both = (
        Run([folder / json_lines]),
        Run([folder / protobuf]),
        Run([folder / json_lines, folder / protobuf]),
    )
    same_tables(left, right)
    same_tables(left, both)
    assert both.store.count("spans") == left.store.count("spans")
    used = [s["used"] for s in both.said.sources]
    assert sorted(used) == [False, True]
    balanced(both)
