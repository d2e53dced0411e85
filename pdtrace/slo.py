"""Limits as people write them: `--slo ttft=500ms,tpot=50ms`, or a TOML file with limits by class of request.

The file has `[[class]]` tables, in the order in which they are tried, and at most one `[default]`
table for the requests that no class takes:

    [[class]]
    name = "long prompts"
    prompt_tokens = { from = 8000 }
    ttft = "3s"
    tpot = "60ms"

    [default]
    ttft = "500ms"
    tpot = "50ms"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pdtrace.errors import BadOption
from pdtrace.model import Slo, SloClass, SloPolicy
from pdtrace.options import duration_ms, parse_slo, slo_limit, with_limit

TEXTS = ("model", "tenant", "session", "route", "request")
_LIMITS = "ttft, tpot, itl, itl_p50, itl_p95, itl_p99, itl_max, e2e"
_KEYS = f"name, {', '.join(TEXTS)}, streaming, prompt_tokens, {_LIMITS}"
ALL = "all requests"


def policy(text: str) -> SloPolicy:
    """The classes that `--slo` names: one for limits on the command line, those of the file for a path.

    Raises BadOption with the place of the mistake.
    """
    if text.strip().lower().endswith(".toml") or ("=" not in text and Path(text).is_file()):
        return read(text.strip())
    return one_class(parse_slo(text))


def one_class(limits: Slo) -> SloPolicy:
    """Limits that hold for every request."""
    return SloPolicy((SloClass(ALL, limits),))


def read(path: str) -> SloPolicy:
    """The classes of a TOML file."""
    import tomllib  # four modules that most commands have no use for

    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise BadOption(
            f"--slo: {path}: {error.strerror}",
            "give the path of a TOML file, or limits such as ttft=500ms",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadOption(
            f"--slo: {path} is not TOML: {error}", 'a limit is written as ttft = "500ms"'
        ) from error
    return _policy(content, path)


def _policy(content: Mapping[str, Any], path: str) -> SloPolicy:
    if unknown := sorted(set(content) - {"class", "default"}):
        raise BadOption(
            f"--slo: {path}: {unknown[0]!r} is not known at the top",
            "the file has [[class]] tables and at most one [default] table",
        )
    tables = content.get("class", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise BadOption(
            f"--slo: {path}: class is no list of tables", "write [[class]], twice bracketed"
        )
    classes = [_class(table, f"{path}, class {n}") for n, table in enumerate(tables, 1)]
    if "default" in content:
        classes.append(_default(content["default"], f"{path}, default"))
    if not classes:
        raise BadOption(
            f"--slo: {path} has no class", 'begin with [[class]] and a line such as ttft = "500ms"'
        )
    _distinct(classes, path)
    return SloPolicy(tuple(classes))


def _distinct(classes: list[SloClass], path: str) -> None:
    """Names tell classes apart, and no class stands behind one that takes everything."""
    names = [c.name for c in classes]
    if double := next((n for n in names if names.count(n) > 1), None):
        raise BadOption(
            f"--slo: {path}: two classes are named {double!r}", "give each class its own name"
        )
    for number, before in enumerate(classes[:-1]):
        if before.takes_all():
            raise BadOption(
                f"--slo: {path}: class {before.name!r} takes every request, so that {names[number + 1]!r} gets none",
                "put it last, or write it as [default]",
            )


def _default(table: Any, where: str) -> SloClass:
    if not isinstance(table, dict):
        raise BadOption(f"--slo: {where}: no table", "write [default] and limits under it")
    found = _class({"name": "default", **table}, where)
    if not found.takes_all():
        raise BadOption(
            f"--slo: {where} has a condition",
            "it takes what no class takes; conditions go into [[class]]",
        )
    return found


def _class(table: Mapping[str, Any], where: str) -> SloClass:
    name = table.get("name", where.rpartition(", ")[2])
    if not isinstance(name, str) or not name.strip():
        raise BadOption(f"--slo: {where}: the name is no text", 'write name = "chat"')
    where = f"{where} ({name})" if "name" in table else where
    limits = Slo()
    conditions: dict[str, Any] = {}
    for key, value in table.items():
        if key in TEXTS:
            conditions[key] = _patterns(value, key, where)
        elif key == "streaming":
            conditions[key] = _yes_or_no(value, where)
        elif key == "prompt_tokens":
            conditions[key] = _band(value, where)
        elif (found := slo_limit(key)) is not None:
            limits = with_limit(limits, *found, _limit(value, key, where), where=f"--slo: {where}")
        elif key != "name":
            raise BadOption(f"--slo: {where}: {key!r} is not known", f"known are: {_KEYS}")
    if not limits.limits():
        raise BadOption(f"--slo: {where} has no limit", f"give at least one of: {_LIMITS}")
    return SloClass(name, limits, **conditions)


def _limit(value: Any, key: str, where: str) -> float:
    if not isinstance(value, str):
        raise BadOption(
            f"--slo: {where}: {key} = {value!r} has no unit", f'write it like {key} = "500ms"'
        )
    try:
        return duration_ms(value)
    except BadOption as error:
        raise BadOption(
            f"--slo: {where}: {key} = {value!r} is no duration", f'write it like {key} = "500ms"'
        ) from error


def _patterns(value: Any, key: str, where: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise BadOption(
            f"--slo: {where}: {key} is no text", f'write {key} = "llama*" or {key} = ["a", "b"]'
        )
    return tuple(texts)


def _yes_or_no(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise BadOption(
            f"--slo: {where}: streaming = {value!r}", "write streaming = true or streaming = false"
        )
    return value


def _band(value: Any, where: str) -> tuple[int | None, int | None]:
    hint = "write prompt_tokens = { from = 2000, below = 8000 }, or one of the two"
    if not isinstance(value, dict) or not value or set(value) - {"from", "below"}:
        raise BadOption(f"--slo: {where}: prompt_tokens is not understood", hint)
    ends = (value.get("from"), value.get("below"))
    if any(
        e is not None and (isinstance(e, bool) or not isinstance(e, int) or e < 0) for e in ends
    ):
        raise BadOption(f"--slo: {where}: prompt_tokens are whole numbers", hint)
    low, high = ends
    if low is not None and high is not None and low >= high:
        raise BadOption(f"--slo: {where}: no prompt has from {low} and below {high} tokens", hint)
    return low, high


def rows(given: SloPolicy) -> list[dict[str, Any]]:
    """The classes as rows of table slo_classes."""
    return [
        {
            "position": position,
            "class": c.name,
            "conditions": ", ".join(_words(c)) or None,
            **{key: _expression(getattr(c, key)) for key in TEXTS},
            "streaming": c.streaming,
            "prompt_from_tokens": c.prompt_tokens[0],
            "prompt_below_tokens": c.prompt_tokens[1],
            **{key: getattr(c.limits, key) for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")},
            "itl_quantile": c.limits.itl_quantile if c.limits.itl_ms is not None else None,
        }
        for position, c in enumerate(given.classes, 1)
    ]


def _words(c: SloClass) -> Iterator[str]:
    for key in TEXTS:
        if patterns := getattr(c, key):
            yield f"{key} {' or '.join(patterns)}"
    if c.streaming is not None:
        yield "streamed" if c.streaming else "not streamed"
    low, high = c.prompt_tokens
    if low is not None or high is not None:
        ends = [
            f"from {low:,}" if low is not None else "",
            f"below {high:,}" if high is not None else "",
        ]
        yield f"prompt tokens {' '.join(e for e in ends if e)}"


def _expression(patterns: tuple[str, ...]) -> str | None:
    """One regular expression for patterns in which only `*` is special."""
    if not patterns:
        return None
    return "|".join(".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns)
