"""A run read from a text, and the same run with the lines that it is told to change."""

import json

import pytest

from klgrad.frameworks import READERS
from klgrad.frameworks.run_file import read_run


@pytest.fixture
def read(tmp_path):
    """Reads a text as a file of this name, or settings as JSON; `settings` are given beside the file."""

    def run(content, name="run.sh", framework=None, trainer=None, **settings):
        if isinstance(content, dict):
            name, content = "run.json", json.dumps(content)
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return read_run(path, framework, trainer, settings)

    return run


@pytest.fixture
def changed():
    """Makes the changes of a run, or those that are not optional."""

    def again(run, *, optional=True):
        lines = {change.name: change.value for change in run.changes if optional or not change.optional}
        given = {name: run.settings[name] for name in run.given}
        return READERS[run.framework].read(given | lines, None)

    return again
