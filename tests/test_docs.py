"""What the documentation says of commands and findings is what there is."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pdtrace import library
from pdtrace.cli import cli

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def readme() -> str:
    path = ROOT / "README.md"
    if not path.is_file():
        pytest.skip("the tests run away from the checkout")
    return path.read_text("utf-8")


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert f"pdtrace {name}" in result.output.split("Options:")[0].partition("\n")[2]
    command = cli.commands[name]
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{name} {parameter.opts}"


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_stands_in_the_readme(name: str, readme: str) -> None:
    assert f"`pdtrace {name}" in readme or f"pdtrace {name} " in readme


def test_every_finding_stands_in_the_docs() -> None:
    page = ROOT / "docs" / "findings.md"
    if not page.is_file():
        pytest.skip("the tests run away from the checkout")
    text = page.read_text("utf-8")
    for query in library.queries().values():
        if query.kind == "findings":
            assert f"## {query.name}" in text, query.name
