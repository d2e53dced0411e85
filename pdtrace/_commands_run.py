"""The command that starts other programs: run."""

from __future__ import annotations

import os

import click

from pdtrace.errors import BadOption


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o", "--output", "folder", metavar="FOLDER", type=click.Path(), default="pdtrace-traces",
    show_default=True, help="Where the traces go, as OTLP files.",
)  # fmt: skip
@click.option("--role", type=click.Choice(["gateway", "router", "frontend", "prefill", "decode", "aggregated"]),
              help="What the program is, where it does not say so itself.")  # fmt: skip
@click.option("--service", metavar="NAME", help="Name of the program in the traces.")
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...", type=click.UNPROCESSED)
def run(folder: str, role: str | None, service: str | None, command: tuple[str, ...]) -> None:
    """Start a Python server or router with its requests recorded, without changing its code.

    Recorded are OpenAI-compatible calls that uvicorn serves, and calls that httpx and aiohttp make.

    \b
    pdtrace run -- python router.py
    pdtrace run -o traces/ --role aggregated -- vllm serve MODEL
    pdtrace diagnose traces/
    """
    from pdtrace.instrumentation.auto import environment

    above = os.path.abspath(folder)  # noqa: PTH100 -- as below
    while not os.path.lexists(above):
        above = os.path.dirname(above)  # noqa: PTH120
    if os.path.isdir(above) and os.access(above, os.W_OK):  # noqa: PTH112
        note = f"traces go to {folder}; then: pdtrace diagnose {folder}"
    else:
        note = f"warning: nothing is recorded, {above} cannot be written"
    click.echo(f"pdtrace: {note}", err=True)
    changed = environment(os.environ, os.path.abspath(folder), role, service)  # noqa: PTH100 -- the program may change its folder
    try:
        os.execvpe(command[0], command, changed)  # noqa: S606 -- the user's own command, in our place
    except OSError as error:
        raise BadOption(
            f"{command[0]}: {error.strerror}", "give the command as you would without pdtrace"
        ) from error
