"""Classes whose methods are shared: as the standard library's dataclasses to who uses them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, field, replace

import pytest

from pdtrace.records import dataclass


@dataclass(frozen=True)
class Point:
    """A place."""

    x: int
    y: int = 0
    seen: list[str] = field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True)
class Named(Point):
    """One with a name."""

    name: str = ""
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.__dict__["length"] = len(self.name)


def test_fields_are_given_by_place_or_name_or_have_their_own_default() -> None:
    point = Point(1, y=2)
    assert (point.x, point.y, point.seen, Point(3).y) == (1, 2, [], 0)
    assert point.seen is not Point(1).seen
    assert repr(point) == "Point(x=1, y=2)"
    assert asdict(point) == {"x": 1, "y": 2, "seen": []}
    named = Named(1, 2, [], "ab")
    assert (named.length, replace(named, name="abc").length) == (2, 3)


@pytest.mark.parametrize(
    ("values", "named"), [((), {}), ((1, 2, [], 4), {}), ((1,), {"z": 2}), ((1,), {"x": 2})]
)
def test_what_does_not_fit_is_refused(values: tuple[int, ...], named: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="Point"):
        Point(*values, **named)  # type: ignore[arg-type]


def test_they_are_compared_and_hashed_by_what_counts() -> None:
    assert Point(1, 2, ["a"]) == Point(1, 2)
    assert Point(1) != Point(2)
    assert Point(1) != Named(1)
    assert Point(1) != 1
    assert {Point(1), Point(1), Point(2)} == {Point(2), Point(1)}
    for other in (copy.copy(Point(1, 2)), pickle.loads(pickle.dumps(Point(1, 2)))):
        assert other == Point(1, 2)


def test_what_is_frozen_stays() -> None:
    point = Point(1)
    with pytest.raises(FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del point.x
    assert point.x == 1
    with pytest.raises(TypeError, match="unhashable"):
        hash(Changing(1))


@dataclass
class Changing:
    """One that may change."""

    x: int
