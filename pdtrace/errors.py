"""The errors that people see: each names the thing, the place and the way out."""

from __future__ import annotations


class PdtraceError(Exception):
    """Something that the user can act on; `hint` says how to go on."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UnreadableInput(PdtraceError):
    """A path that cannot be opened, decompressed or decoded."""


class UnknownFormat(PdtraceError):
    """No collector recognised anything in the given paths."""


class SchemaMismatch(PdtraceError):
    """A batch does not fit its table: column, expected type, found type."""


class UnknownQuery(PdtraceError):
    """No query of that name, or SQL that DuckDB refuses."""
