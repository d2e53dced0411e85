"""Places of names among others."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from pdtrace import _lookup


@pytest.mark.parametrize("way", [_lookup.places, _lookup._by_text])
def test_each_name_has_its_place_and_what_is_unknown_none(way: object) -> None:
    names = pl.Series(["b", "x", None, "a", "b"], dtype=pl.String)
    among = pl.Series(["a", "b", None, "c"], dtype=pl.String)
    assert way(names, among).tolist() == [1, -1, -1, 0, 1]  # type: ignore[operator]
    assert way(names, among.clear()).tolist() == [-1] * 5  # type: ignore[operator]
    assert way(names.clear(), among).tolist() == []  # type: ignore[operator]


def test_a_name_that_shares_only_its_hash_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_letter(names: pl.Series) -> pl.Series:
        return names.str.slice(0, 1).cast(pl.Categorical).to_physical().cast(pl.UInt64)

    monkeypatch.setattr(pl.Series, "hash", first_letter)
    among = pl.Series(["alpha", "beta"])
    assert _lookup.places(pl.Series(["another", "beta"]), among).tolist() == [-1, 1]
    alike = pl.Series(["alpha", "also"])
    assert _lookup.places(pl.Series(["also", "alpha"]), alike).tolist() == [1, 0]


def test_many_names_are_found_in_whatever_order_they_come() -> None:
    among = pl.Series([f"request-{number:05}" for number in range(3000)])
    order = np.random.default_rng(1).integers(0, 6000, 10_000)
    names = pl.Series([f"request-{number:05}" for number in order.tolist()])
    assert _lookup.places(names, among).tolist() == np.where(order < 3000, order, -1).tolist()


def test_hashes_of_which_all_but_one_find_their_slot_taken_are_found_all_the_same() -> None:
    near = np.arange(1, 500, dtype=np.uint64)  # the slot is chosen by the other end of a number
    found = _lookup._by_hash(near[::-1], near)
    assert found is not None
    assert found.tolist() == list(range(498, -1, -1))
    assert _lookup._by_hash(near, np.append(near, near[:1])) is None


def test_numbers_that_repeat_are_found() -> None:
    assert _lookup.repeated(pl.Series([3, 1, 2])).to_list() == [False, False, False]
    assert _lookup.repeated(pl.Series([3, 1, 3])).to_list() == [True, False, True]
    assert _lookup.repeated(pl.Series([], dtype=pl.UInt64)).to_list() == []
