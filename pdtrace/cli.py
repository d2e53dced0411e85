"""The command line's door: the commands in the order of their use, errors in one line with a hint, exit codes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

import click

from pdtrace import (
    __version__,
    _commands_analysis,
    _commands_data,
    _commands_diagnosis,
    _commands_export,
    _commands_run,
    _commands_runs,
    _commands_views,
    _own_process,
)
from pdtrace._door import FINE, OUR_ERROR, USAGE
from pdtrace.errors import REPORT, BadOption, PdtraceError, in_one_line, interrupted, printable

_LASTING = {"view", "run"}  # commands that stay as long as the user wants
STDOUT, STDERR = 1, 2  # the numbers of these files
INTERRUPTED, TERMINATED = 130, 143  # 128 + the signal, as shells say it


class _PipeClosed(Exception):
    """Nobody reads the output any more; click itself would end with 1."""


class _Group(click.Group):
    """Commands in the order of their use, not of the alphabet."""

    def invoke(self, ctx: click.Context) -> Any:
        """Keep a closed pipe out of click's hands."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _PipeClosed from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='Shell completion: eval "$(_PDTRACE_COMPLETE=bash_source pdtrace)"  (zsh_source, fish_source likewise)',
)
@click.version_option(__version__, prog_name="pdtrace")
def cli() -> None:
    """Where the time of an LLM request went, and who took it.

    Reads what LLM servers and their clients leave behind: logs, traces, metrics, bench files, tables of requests.
    `pdtrace sources` lists the systems.

    \b
    pdtrace diagnose logs/              the diagnosis of a folder of dumps
    pdtrace diagnose requests.csv       the same from a table of requests
    pdtrace demo                        the diagnosis of a real vLLM run that ships with pdtrace
    """


_COMMANDS = (
    _commands_diagnosis.diagnose,
    _commands_diagnosis.explain,
    _commands_analysis.slow,
    _commands_runs.compare,
    _commands_runs.whatif,
    _commands_views.report,
    _commands_views.view,
    _commands_diagnosis.coverage,
    _commands_data.query,
    _commands_data.ingest,
    _commands_export.export,
    _commands_data.sources,
    _commands_data.schema,
    _commands_run.run,
    _commands_diagnosis.demo,
)
for _command in _COMMANDS:
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; errors of ours become `error:` and `hint:` lines on stderr."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # no ASCII terminal stops a report
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and not _LASTING.intersection(words[:1]):
        _own_process.rest_from_cycles()
    debug = "--debug" in words
    if debug:
        logger = logging.getLogger("pdtrace")
        logger.handlers = [logging.StreamHandler(sys.stderr)]
        logger.setLevel(logging.DEBUG)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    code = _run(words, debug=debug)
    if not debug:
        _own_process.end(code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """What goes to a closed stdout or stderr (`pdtrace ... >&-`) goes nowhere; the command does all else, with its exit code.

    Their numbers must not go to the next file that is opened: whatever a library prints would land in it.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(number)
    for name, number in (("stdout", STDOUT), ("stderr", STDERR)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 -- it stays


def _run(words: list[str], *, debug: bool) -> int:
    try:
        code = cli.main(words, prog_name="pdtrace", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except (BrokenPipeError, _PipeClosed):  # `pdtrace ... | head`
        _mute(sys.stdout)
        return FINE
    except BaseException as error:  # a panic in a Rust library is no Exception
        if interrupted(error):
            click.echo("interrupted", err=True)
            return INTERRUPTED
        if isinstance(error, SystemExit | GeneratorExit) or debug:
            raise
        return _told(error)
    return code if isinstance(code, int) else FINE


def _told(error: BaseException) -> int:
    """Say in one line what went wrong and in another how to go on; the exit code."""
    message, hint = _sentence(error)
    for label, text in (("error", message), ("hint", hint)):
        if text:
            click.echo(f"{label}: {printable(' '.join(text.split()))}", err=True)
    return USAGE if isinstance(error, BadOption) else OUR_ERROR


def _sentence(error: BaseException) -> tuple[str, str]:
    if isinstance(error, PdtraceError):
        return error.message, error.hint
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return (
            f"{where}{error.strerror or error}",
            "free space or give another path, and run it again",
        )
    if isinstance(error, MemoryError):
        return (
            "out of memory",
            "give fewer files at once, or `pdtrace ingest` them into a file first",
        )
    return f"pdtrace failed: {in_one_line(error)}", REPORT


def _mute(stream: IO[str]) -> None:
    """Send what is still buffered nowhere, so that the interpreter's own flush at exit stays silent."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _terminated(*_: object) -> None:
    """SIGTERM ends the program as an exit does, so that unfinished files are removed."""
    sys.exit(TERMINATED)
