"""Tiles so small that a small problem has several chunks, strips and tiles."""

import pytest
from kernels.cases import SMALL_TILES

from klgrad.kernels import tiling


@pytest.fixture
def small_tiles(monkeypatch):
    for name, value in SMALL_TILES.items():
        monkeypatch.setattr(tiling, name, value)
