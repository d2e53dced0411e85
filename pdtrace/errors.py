"""The errors that people see: each names the thing, the place and the way out."""

from __future__ import annotations


class PdtraceError(Exception):
    """Something that the user can act on; `hint` says how to go on."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadOption(PdtraceError):
    """An option or argument that is not understood: a usage error."""


class UnreadableInput(PdtraceError):
    """A path that cannot be opened, decompressed or decoded."""


class UnknownFormat(PdtraceError):
    """No collector recognised anything in the given paths."""


class SchemaMismatch(PdtraceError):
    """A batch does not fit its table: column, expected type, found type."""


class UnknownQuery(PdtraceError):
    """No query of that name, or SQL that DuckDB refuses."""


REPORT = "please report it with the output of --debug"


def reraise_stop(error: BaseException) -> None:
    """Raise what ends the program (Ctrl-C, exit) again; everything else is a failure to be told.

    Failures are caught as BaseException, because a panic in Polars or another Rust library is one.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    if type(error).__name__ == "InterruptException":  # DuckDB's word for Ctrl-C
        raise KeyboardInterrupt from error


def in_one_line(error: BaseException) -> str:
    """Kind and first words of an unexpected error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
