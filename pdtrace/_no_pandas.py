"""Keeps pyarrow from importing pandas: 0.4 s and 60 MB that a command has no use for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Nowhere:
    """Says of pandas that it is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is left out on purpose", name="pandas")
        return None


def leave_out() -> None:
    """Let pyarrow look for pandas now, once and for all, while there is none to be found.

    pyarrow imports it with the first array, wherever it is installed, to see whether the values are
    its. Only for a process of our own: pyarrow cannot convert from and to pandas afterwards.
    """
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    nowhere = _Nowhere()
    sys.meta_path.insert(0, nowhere)
    try:
        pa.array([0])  # not an empty one: with the first value its C++ part looks, too
    finally:
        sys.meta_path.remove(nowhere)
