"""Python values as programs print them: read as syntax, never evaluated."""

from __future__ import annotations

import ast
import re
from typing import Any

MAX_REPR_CHARACTERS = 64 << 10


def python_repr(text: str) -> Any:
    """The value that a Python repr shows; objects as dicts of their arguments; None: unreadable."""
    if len(text) > MAX_REPR_CHARACTERS:
        return None
    for attempt in (text, re.sub(r"<[^<>]*>", "'object'", text)):
        try:
            return _value(ast.parse(attempt, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(k)): _value(v) for k, v in pairs if k is not None}
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _value(node.operand)
        return -inner if isinstance(inner, (int, float)) else ast.unparse(node)
    if isinstance(node, ast.Call):
        if not node.keywords and len(node.args) == 1:  # np.float64(9.8), PosixPath('x')
            return _value(node.args[0])
        return {"_call": ast.unparse(node.func)} | {
            keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg
        }
    return ast.unparse(node)
