"""The colours of the phases are told apart, by colour-blind people too, on white and on dark."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from pdtrace.dashboards import _theme
from pdtrace.model import PHASES

# Machado, Oliveira, Fernandes (2009), severity 1: linear RGB as seen without one kind of cone.
SEEN_AS = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(c)) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


def test_every_phase_has_a_colour_of_its_own() -> None:
    assert tuple(_theme.PHASE_COLOURS) == PHASES
    assert len(set(_theme.PHASE_COLOURS.values())) == len(PHASES)


@pytest.mark.parametrize("cones", SEEN_AS)
def test_phases_are_told_apart(cones: str) -> None:
    seen = {
        phase: lab(np.array(SEEN_AS[cones]) @ linear(colour))
        for phase, colour in _theme.PHASE_COLOURS.items()
    }
    close = [(a, b) for a, b in combinations(PHASES, 2) if np.linalg.norm(seen[a] - seen[b]) < 15]
    assert close == []


@pytest.mark.parametrize("ground", ["#ffffff", "#14171c"])
def test_phases_stand_out_from_the_page(ground: str) -> None:
    assert min(contrast(colour, ground) for colour in _theme.PHASE_COLOURS.values()) > 1.65
