"""The state of the live page as its URL holds it: which requests are looked at, under which limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

from pdtrace import numbers
from pdtrace.errors import BadOption
from pdtrace.model import SloPolicy
from pdtrace.options import parse_instant, parse_slo
from pdtrace.selection import Band, Filter, State
from pdtrace.slo import one_class

UNKNOWN = "unknown"
STATES: tuple[State, ...] = ("met", "missed", "open")
STATE_WORDS = {"met": "limits met", "missed": "limits missed", "open": "cannot be told"}
_MANY = ("model", "worker", "tenant", "state")
_ONE = ("deployment", "from", "until", "prompt", "output", "slo")
KEYS = (*_ONE, *_MANY)
_LONGEST = 1000  # values of one key: more are a mistake
_LARGEST = 2**53

Query = Sequence[tuple[str, str]]


def wanted(query: Query, limits: SloPolicy | None = None) -> Filter:
    """The selection that a query string asks for; `limits` hold where it names none. Other keys are left alone.

    Raises BadOption.
    """
    given: dict[str, list[str]] = {key: [] for key in KEYS}
    for key, value in query:
        if key in given:
            given[key].append(value)
    if long := next((key for key, values in given.items() if len(values) > _LONGEST), None):
        raise BadOption(f"{long}: more than {_LONGEST} values", "choose fewer")
    one = {key: given[key][-1].strip() or None for key in _ONE if given[key]}
    if text := one.get("slo"):
        limits = one_class(parse_slo(text))
    found = Filter(
        deployment=one.get("deployment"),
        from_ns=_instant("from", one),
        until_ns=_instant("until", one),
        models=_texts(given["model"]),
        workers=_texts(given["worker"]),
        tenants=_texts(given["tenant"]),
        prompt=_band("prompt", one),
        output=_band("output", one),
        states=_states(given["state"]),
        limits=limits,
    )
    if found.from_ns is not None and found.until_ns is not None and found.from_ns >= found.until_ns:
        raise BadOption("from is not before until", "exchange them; the end is exclusive")
    if found.states and limits is None:
        raise BadOption(
            "state asks for limits that are met, and there are none",
            "give limits such as ttft=500ms,tpot=50ms",
        )
    return found


def _instant(key: str, one: Mapping[str, str | None]) -> int | None:
    text = one.get(key)
    # `+` of a zone is a space in a query string
    return None if text is None else parse_instant(text.replace(" ", "+") if "T" in text else text)


def _texts(values: Sequence[str]) -> tuple[str | None, ...]:
    """Each value once, in an order that does not depend on the order of clicks; an empty one means unknown."""
    known = sorted({value for value in values if value})
    return (*known, None) if "" in values else tuple(known)


def _states(values: Sequence[str]) -> tuple[State, ...]:
    if bad := next((value for value in values if value not in STATES), None):
        raise BadOption(f"state: {bad!r} is not known", f"known are: {', '.join(STATES)}")
    return cast("tuple[State, ...]", tuple(s for s in STATES if s in values))


def _band(key: str, one: Mapping[str, str | None]) -> Band | None:
    text = one.get(key)
    if text is None:
        return None
    if text == UNKNOWN:
        return Band(unknown=True)
    low, dash, high = text.partition("-")
    if not dash or not all(
        not part or (part.isascii() and part.isdecimal()) for part in (low, high)
    ):
        raise BadOption(
            f"{key}: {text!r} is no range of tokens", "write it like 512-2048, -128 or 32768-"
        )
    first, last = (int(part) if part else None for part in (low, high))
    if max(first or 0, last or 0) > _LARGEST:
        raise BadOption(f"{key}: {text!r} is too large", "write it like 512-2048")
    return Band(first, last)


def words(chosen: Filter, name: Callable[[str], str] = str) -> list[tuple[str, str]]:
    """The conditions for people, each with its key in the query string; `name` is how people call a worker."""
    found: list[tuple[str, str]] = []
    for text, key, instant in (
        ("at or after", "from", chosen.from_ns),
        ("before", "until", chosen.until_ns),
    ):
        if instant is not None:
            found.append((f"started {text} {_iso(instant)}", key))
    for key, values in (
        ("model", chosen.models),
        ("worker", tuple(None if w is None else name(w) for w in chosen.workers)),
        ("tenant", chosen.tenants),
    ):
        if values:
            known = (UNKNOWN if value is None else value for value in values)
            found.append((f"{key} {' or '.join(known)}", key))
    if chosen.states:
        found.append((" or ".join(STATE_WORDS[s] for s in chosen.states), "state"))
    for label, key, band in (
        ("prompt", "prompt", chosen.prompt),
        ("answer", "output", chosen.output),
    ):
        if band is not None:
            found.append((f"{label} {_band_words(band)}", key))
    return found


def _iso(instant_ns: int) -> str:
    seconds, rest = divmod(instant_ns, 1_000_000_000)
    text = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1000:06d}"
    return text.rstrip("0").rstrip(".") + "Z"


def _band_words(band: Band) -> str:
    if band.unknown:
        return "of unknown length"
    ends = []
    if band.low is not None:
        ends.append(f"from {numbers.count(band.low)}")
    if band.high is not None:
        ends.append(f"below {numbers.count(band.high)}")
    return f"{' '.join(ends)} tokens" if ends else "of known length"
