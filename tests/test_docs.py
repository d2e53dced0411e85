"""What the documentation says of commands and findings is what there is."""

from __future__ import annotations

import html
import re
import shlex
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
    index = ROOT / "docs" / "findings.md"
    if not index.is_file():
        pytest.skip("the tests run away from the checkout")
    listed = index.read_text("utf-8")
    names = {query.name for query in library.queries().values() if query.kind == "findings"}
    assert names == {page.stem for page in (ROOT / "docs" / "findings").glob("*.md")}
    for name in names:
        assert f"(findings/{name}.md)" in listed, name


LINK = re.compile(r"!?\[[^\]\[]*\]\(([^)\s]+)\)")
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")]
    if (ROOT / "pdtrace").is_dir()
)


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown viewer makes of the headings."""
    titles = re.findall(r"^#+ +(.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        goal = page.parent / name if name else page
        assert goal.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(goal), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_page_holds_a_path_of_a_machine(page: Path) -> None:
    assert not re.search(r"(?<![\w/.])/(work|root|home|tmp|Users)/\w", page.read_text("utf-8"))


def test_every_page_stands_in_the_list(readme: str) -> None:
    listed = (ROOT / "docs" / "README.md").read_text("utf-8")
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "howto").glob("*.md")]:
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "README.md" or f"({name})" in listed, name


def test_every_room_stands_on_the_page_of_the_house() -> None:
    page = ROOT / "docs" / "architecture.md"
    if not page.is_file():
        pytest.skip("the tests run away from the checkout")
    text = page.read_text("utf-8")
    for path in sorted((ROOT / "pdtrace").glob("[a-z]*.py")):
        assert f"`{path.name}`" in text or f"`pdtrace/{path.name}`" in text, path.name


def commands_shown(text: str) -> list[str]:
    """Command lines in shell blocks and in the first column of tables, without `pdtrace` itself."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    lines = re.findall(r"^pdtrace ([^#\n]+)", blocks, re.MULTILINE)
    return lines + re.findall(r"^\| `pdtrace ([^`]+)` \|", text, re.MULTILINE)


def test_the_commands_in_the_readme_are_understood(readme: str) -> None:
    shown = commands_shown(readme)
    assert {line.split()[0] for line in shown} == set(cli.commands)
    for line in shown:
        name, *words = shlex.split(line)
        known = {option for p in cli.commands[name].params for option in p.opts}
        options = [word for word in words if word.startswith("-") and word != "--"]
        assert known.issuperset(options), line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_commands_on_every_page_are_understood(page: Path) -> None:
    for line in commands_shown(page.read_text("utf-8")):
        name, *words = shlex.split(line.partition(" -- ")[0])
        if name == "--help":
            continue
        assert name in cli.commands, line
        known = {option for p in cli.commands[name].params for option in p.opts}
        assert known.issuperset(word for word in words if word.startswith("-") and word != "-"), (
            line
        )


def test_the_pictures_show_no_machine_and_need_no_network() -> None:
    pictures = ROOT / "docs" / "pictures"
    if not pictures.is_dir():
        pytest.skip("the tests run away from the checkout")
    for path in pictures.glob("*.svg"):
        text = html.unescape(path.read_text("utf-8"))
        assert "url(http" not in text
        assert "@import" not in text
        assert not re.search(r"/(work|root|home|tmp|Users)/\w", text)
