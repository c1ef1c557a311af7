"""Figures of few dots, which take a third of the time; tests/support has those of the resolution that is written."""

import pytest

from klgrad import drawing


@pytest.fixture(autouse=True)
def _few_dots(monkeypatch):
    monkeypatch.setattr(drawing, "DPI", 30)
