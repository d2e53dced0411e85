"""Finds collectors by name: ours by file, strangers' by entry point; sniffs; imports lazily."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from pdtrace.errors import PdtraceError, in_one_line, reraise_stop
from pdtrace.model import STRENGTH, Claims, Head, Match

ENTRY_POINT_GROUP = "pdtrace.collectors"
_log = logging.getLogger(__name__)


@cache
def collectors() -> dict[str, ModuleType]:
    """All collectors by name, sorted."""
    package = importlib.import_module("pdtrace.collectors")
    names = sorted(
        m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")
    )
    found = {name: importlib.import_module(f"pdtrace.collectors.{name}") for name in names}
    for point in _strangers():
        try:
            found.setdefault(point.name, point.load())
        except Exception as error:  # a stranger's module may fail in any way
            raise PdtraceError(
                f"collector {point.name} ({point.value}) cannot be imported: {error}",
                "uninstall or mend the package that brings it",
            ) from error
    return dict(sorted(found.items()))


def _strangers() -> Iterable[EntryPoint]:
    """What other packages bring. To parse the entry points of all packages takes 10 ms: only where one names ours."""
    return entry_points(group=ENTRY_POINT_GROUP) if _may_be_named() else ()


def _may_be_named() -> bool:
    """Whether a package names our group, or is where only importlib.metadata can look."""
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):  # fmt: skip
        return True
    for place in sys.path:
        if os.path.isfile(place):  # noqa: PTH113 -- false where pathlib raises
            return True
        for name in _listed(place or "."):
            if name.lower().endswith((".dist-info", "egg-info")):
                with suppress(OSError):
                    told = Path(place, name, "entry_points.txt").read_bytes()
                    if ENTRY_POINT_GROUP.encode() in told:
                        return True
    return False


def _listed(place: str) -> list[str]:
    try:
        return os.listdir(place)  # noqa: PTH208 -- names, not paths
    except OSError:
        return []


def sniff(head: Head, failures: list[str] | None = None) -> list[tuple[str, Match]]:
    """The collectors that should look at a source: all of the greatest strength that any claims.

    A collector that breaks down over a head does not claim it; that is added to `failures`.
    """
    matches: list[tuple[str, Match]] = []
    # Those that never say more than `generic` or `dialect` are asked last, and not at all behind a stronger one:
    # whether a file is just any table, or none of any use, takes longer to tell than all the rest.
    weakest_last = sorted(collectors().items(), key=lambda item: _at_most(item[1]), reverse=True)
    for name, module in weakest_last:
        if any(STRENGTH[match.strength] > _at_most(module) for _, match in matches):
            break
        try:
            match = module.sniff(head)
        except BaseException as error:
            reraise_stop(error)
            _log.debug("collector %s: sniff failed on %s", name, head.path, exc_info=True)
            if failures is not None:
                failures.append(f"collector {name} failed: {in_one_line(error)}")
            continue
        if match is not None:
            matches.append((name, match))
    if not matches:
        return []
    best = max(STRENGTH[match.strength] for _, match in matches)
    chosen = sorted(
        ((name, match) for name, match in matches if STRENGTH[match.strength] == best),
        key=lambda item: item[0],
    )
    readers = [(name, match) for name, match in chosen if not match.ignore]
    return readers or chosen[:1]


def _at_most(module: ModuleType) -> int:
    """The greatest strength that a collector ever claims a source with."""
    return STRENGTH[getattr(module, "AT_MOST", "exact")]


def claims() -> dict[str, Claims]:
    """The span claims of the collectors that interpret, those that take what is left over last."""
    found = {
        name: module.CLAIMS for name, module in collectors().items() if hasattr(module, "CLAIMS")
    }
    return dict(sorted(found.items(), key=lambda item: (item[1].fallback, item[0])))


def owner(scope: str | None, name: str, keys: frozenset[str]) -> str | None:
    """The collector that owns spans of this scope and name having these attribute keys."""
    for test in (
        lambda c: _matches(scope, c.scopes),
        lambda c: _matches(name, c.names) or bool(keys.intersection(c.shared_names.get(name, ()))),
        lambda c: any(key.startswith(prefix) for prefix in c.prefixes for key in keys),
        lambda c: c.fallback,
    ):
        for collector, claim in claims().items():
            if test(claim):
                return collector
    return None


def _matches(text: str | None, patterns: tuple[str, ...]) -> bool:
    """Whether text equals a pattern or begins with one that ends in a star."""
    if text is None:
        return False
    return any(text.startswith(p[:-1]) if p.endswith("*") else text == p for p in patterns)
