"""The example scripts run."""

import runpy

import pytest

from klgrad.logs import examine

EXAMPLE = "examples/callback.py"


@pytest.mark.slow
def test_the_logs_of_the_example_with_the_callback_can_be_read(tmp_path, request):
    example = runpy.run_path(str(request.config.rootpath / EXAMPLE))
    example["main"](tmp_path)
    report = examine(tmp_path / "rollouts", by="step")
    assert [part.label for part in report.parts] == [1, 3, 5, 7, 9]
    kls = [part.kl.estimates["kl/reverse/k3/per_token"].mean for part in report.parts]
    assert kls[0] == 0 < kls[-1]
