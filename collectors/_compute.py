"""pyarrow.compute, loaded with the first call: it makes 300 functions, 45 ms that files without columns need not pay."""

from __future__ import annotations

from typing import Any


class _Compute:
    """Hands out the functions of pyarrow.compute."""

    def __getattr__(self, name: str) -> Any:
        import pyarrow.compute

        function = getattr(pyarrow.compute, name)
        setattr(self, name, function)
        return function


pc = _Compute()
