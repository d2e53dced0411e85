"""The registry of names, the constants in the code and the page of the documentation are one."""

from __future__ import annotations

import importlib.util
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdtrace import model, semconv
from pdtrace.instrumentation import encode

PAGES = Path(__file__).resolve().parents[1] / "docs" / "make_pages.py"


@pytest.fixture(scope="module")
def groups() -> list[dict[str, Any]]:
    text = files("pdtrace.schemas").joinpath("semconv/pdtrace.yaml").read_text("utf-8")
    found: list[dict[str, Any]] = yaml.safe_load(text)["groups"]
    return found


def constants() -> set[str]:
    values: set[str] = set()
    for name, value in vars(semconv).items():
        if name.isupper():
            values |= set(value.values()) if isinstance(value, dict) else {value}
    return {v for v in values if v.startswith(("pdtrace.", "gen_ai.latency."))}


def test_every_name_of_ours_stands_in_the_registry_and_no_other(groups: list[Any]) -> None:
    spans = {g["id"].removeprefix("span.") for g in groups if g["type"] == "span"}
    attributes = {
        a["id"] for g in groups if g["type"] == "attribute_group" for a in g["attributes"]
    }
    assert spans | attributes == constants()
    assert spans == {semconv.SPAN_REQUEST, semconv.SPAN_DISPATCH, semconv.SPAN_STEPS, *semconv.PHASE_SPANS}  # fmt: skip


def test_every_reference_is_a_name_of_ours_or_of_opentelemetry(groups: list[Any]) -> None:
    ours = {a["id"] for g in groups if g["type"] == "attribute_group" for a in g["attributes"]}
    known = {value for value in vars(semconv).values() if isinstance(value, str)}
    for group in groups:
        for attribute in group["attributes"] if group["type"] == "span" else ():
            assert attribute["ref"] in ours | known, attribute["ref"]


def test_enumerations_are_those_of_the_model(groups: list[Any]) -> None:
    types = {a["id"]: a["type"] for g in groups for a in g["attributes"] if "id" in a}
    roles = [member["value"] for member in types[semconv.WORKER_ROLE]["members"]]
    assert roles == list(model.ROLES)


def test_every_word_of_the_api_has_a_name() -> None:
    assert set(encode.WORDS.values()) <= {v for v in vars(semconv).values() if isinstance(v, str)}


def test_the_generated_pages_are_those_of_the_code() -> None:
    if not PAGES.is_file():
        pytest.skip("the tests run away from the checkout")
    spec = importlib.util.spec_from_file_location("make_pages", PAGES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in (("semconv.md", module.page()), ("sql.md", module.sql_page())):
        assert (PAGES.parent / name).read_text("utf-8") == text, f"{name}: run `make docs`"
