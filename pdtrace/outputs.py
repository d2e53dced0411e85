"""Files that a reporter makes: whole or not at all, and never over something that was not meant."""

from __future__ import annotations

import gzip
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, cast

from pdtrace.errors import PdtraceError


@contextmanager
def writing(output: str, *, force: bool = False) -> Iterator[IO[bytes]]:
    """A binary stream into a new file, gzipped where the name ends in .gz; the name appears when all is written.

    Raises PdtraceError when the file exists and force is not given, or when it cannot be made.
    """
    target = Path(output)
    if target.is_dir():
        raise PdtraceError(f"{output}: is a folder", "give -o the name of a file")
    if target.exists() and not force:
        raise PdtraceError(
            f"{output}: exists already", "give another name, or --force to replace it"
        )
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}")
    try:
        with draft.open("wb") as file, _packed(target, file) as stream:
            yield stream
        draft.replace(target)
    except OSError as error:
        raise PdtraceError(
            f"{output}: cannot be written: {error.strerror or error}",
            "give -o a file in a folder that you may write to",
        ) from error
    finally:
        with suppress(OSError):  # a read-only disk says so of a file that is not there
            draft.unlink(missing_ok=True)


def _packed(target: Path, file: IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    """The stream itself, or one that packs; the same content gives the same file."""
    if target.suffix != ".gz":
        return nullcontext(file)
    return cast("AbstractContextManager[IO[bytes]]", gzip.GzipFile(filename="", mode="wb", compresslevel=5, fileobj=file, mtime=0))  # fmt: skip
