"""Every fixture goes through its collector and gives the rows that a person read and approved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdtrace import library, registry
from pdtrace.inputs import expand
from pdtrace.sink import Account, Reading, SourceSink
from pdtrace.store import Store

FIXTURES = Path(__file__).parent / "fixtures"
ROWS_SHOWN = 5  # of each table, in the golden file; counts are of all rows
CASES = sorted(
    path
    for folder in sorted(FIXTURES.iterdir() if FIXTURES.is_dir() else [])
    if folder.name in registry.collectors()
    for path in folder.iterdir()
    if path.name != "ORIGIN" and not path.name.endswith(".expected.json") and path.is_file()
)


def golden(collector: str, path: Path) -> dict[str, object]:
    """Counts and first rows of each table that a fixture gives."""
    store = Store()
    item = expand([str(path)])[0]
    item.path = path.name  # no folder of this machine in the golden file
    account = Account(item)
    sink = SourceSink(store, account)
    reading = Reading(item, lambda _: None)
    registry.collectors()[collector].read(reading, sink)
    sink.close()
    reading.fingerprint()
    result: dict[str, object] = {
        "unit": account.unit,
        "read": account.read,
        "skipped": dict(sorted(account.reasons.items())),
    }
    for table in library.tables().values():
        rows = store.sql(f"FROM {table.name} ORDER BY ALL")
        if rows.height:
            shown = [
                {k: v[:3] if k == "hashes" else v for k, v in row.items() if v is not None}
                for row in rows.head(ROWS_SHOWN).to_dicts()
            ]
            result[table.name] = {"rows": rows.height, "first": shown}
    return json.loads(json.dumps(result, default=str, ensure_ascii=False))


def test_every_fixture_folder_says_where_it_comes_from() -> None:
    for folder in FIXTURES.iterdir():
        assert (folder / "ORIGIN").is_file(), folder.name


@pytest.mark.parametrize("path", CASES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_fixture_gives_its_golden_rows(path: Path, request: pytest.FixtureRequest) -> None:
    module = registry.collectors()[path.parent.name]
    matches = dict(registry.sniff(expand([str(path)])[0].head()))
    if path.parent.name not in matches and module.sniff(expand([str(path)])[0].head()) is None:
        pytest.skip("spans only: read by another collector")
    found = golden(path.parent.name, path)
    expected = path.with_name(path.name + ".expected.json")
    if request.config.getoption("--golden"):
        expected.write_text(
            json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8"
        )
    assert expected.is_file(), "run pytest tests/test_collectors.py --golden and read what it wrote"
    assert found == json.loads(expected.read_text("utf-8"))
    assert found["read"] >= sum(found["skipped"].values())
