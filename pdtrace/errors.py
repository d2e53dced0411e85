"""The errors that people see: each names the thing, the place and the way out."""

from __future__ import annotations

import re


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


PROBLEM = "_problem"  # key of facts that say what could not be done; the diagnosis shows them
REPORT = "please report it with the output of --debug"


def reraise_stop(error: BaseException) -> None:
    """Raise what ends the program (Ctrl-C, exit) again; everything else is a failure to be told.

    Failures are caught as BaseException, because a panic in Polars or another Rust library is one.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    if interrupted(error):
        raise KeyboardInterrupt from error


def interrupted(error: BaseException) -> bool:
    """Whether DuckDB tells of Ctrl-C: by a kind of its own, or from within a result by a plain RuntimeError."""
    if type(error).__name__ == "InterruptException":
        return True
    return isinstance(error, RuntimeError) and str(error) == "Query interrupted"


def in_one_line(error: BaseException) -> str:
    """Kind and first words of an unexpected error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


# Signs that steer a terminal or hide text: controls but tab and newline, bidirectional overrides, halves of pairs.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text from data, safe to print: signs that steer a terminal become U+FFFD."""
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", text)
