"""The KLs of runs in the frameworks' own repositories: the settings of each file, and what its reader makes of them.

`run_files/real_runs.json` names the file and the commit; its settings are those that were read from the whole file.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from klgrad.frameworks import READERS

RUNS = json.loads((Path(__file__).parent / "run_files" / "real_runs.json").read_text())


@pytest.mark.parametrize("known", RUNS, ids=lambda known: known["file"])
def test_a_run_has_the_kls_of_its_settings(known):
    run = READERS[known["framework"]].read(known["given"], None)
    assert [[part.place, part.coefficient, part.loss] for part in run.parts] == known["parts"]
    assert list(run.unread) == known["unread"]


def test_each_framework_has_three_files():
    counts = Counter(known["framework"] for known in RUNS)
    with_source = {name for name, reader in READERS.items() if reader.source}
    assert {name for name, count in counts.items() if count >= 3} == with_source | {"verl"}
