"""Faults put into a copy of the package on purpose: each must break a fact about logs."""

import importlib
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from logs.facts import broken

import klgrad

PACKAGE = Path(klgrad.__file__).parent

MUTATIONS = {
    "errors without the correction for few clusters": (
        "core/standard_errors.py",
        "(self.square / left)",
        "(self.square)",
    ),
    "a prompt's completions counted as independent": (
        "reports/accumulators.py",
        "self._clustered() or self._sums",
        "self._sums",
    ),
    "batches about means of their own": (
        "core/standard_errors.py",
        "off = mean - _ratio(self.total, self.count)",
        "off = 0 * mean",
    ),
    "token ratios for prefix ratios": (
        "reports/accumulators.py",
        "prefix_ratio(rollout)[live]",
        "token_ratio(rollout)[live]",
    ),
    "a ratio without a token": (
        "reports/accumulators.py",
        "sequence_ratio(rollout)[live.any(-1), 0]",
        "sequence_ratio(rollout)[:, 0]",
    ),
    "the mismatch the other way round": ("reports/divergence.py", "away = -seen.log_ratio", "away = seen.log_ratio"),
    "coefficients of a mean": ("logs/coefficients.py", "else gradient * len(rollout.logp)", "else gradient"),
    "a sign of the difference": ("logs/coefficients.py", "(c - s) @ (c - s)", "(c + s) @ (c + s)"),
    "what is alive counted as dead": ("logs/coefficients.py", "c.abs() < DEAD", "c.abs() > DEAD"),
    "lengths with dead tokens": ("logs/chunk.py", "lengths = counted[ends] - counted[ends - lengths]", "pass"),
    "padding taken for tokens": ("logs/chunk.py", "steps < lengths[:, None]", "steps <= lengths[:, None]"),
    "places among live tokens": ("logs/chunk.py", "token = int(torch.nonzero(live)[token])", "pass"),
    "the other neighbour": (
        "logs/diagnosis/evidence.py",
        "(seen.sampler_logp, seen.logp, live)",
        "(seen.logp, seen.sampler_logp, live)",
    ),
    "repeats of any token": ("logs/diagnosis/evidence.py", "& (y[1:] == y[:-1])", ""),
    "the ratio upside down": ("logs/diagnosis/sampling.py", "torch.expm1(-case.d)", "torch.expm1(case.d)"),
    "limits on the other side": ("logs/diagnosis/temperature.py", "limit - y if a > 1 else y - limit", "y - limit"),
    "limits of the log-prob": ("logs/diagnosis/temperature.py", "x - torch.log(-torch.expm1(x))", "x - 0"),
    "a filter where the mass is above 1": (
        "logs/diagnosis/sampling.py",
        "mean + 5 * error < 1",
        "mean - 5 * error > 1",
    ),
    "nothing beside a filter": ("logs/diagnosis/sampling.py", "found.within < 0.05", "found.within > 0.05"),
    "noise taken for what is systematic": ("logs/diagnosis/causes.py", "case.noise > 0.5", "case.noise < 0.5"),
    "every number a bf16 number": (
        "logs/diagnosis/causes.py",
        "values.to(dtype).double() == values",
        "values == values",
    ),
    "lines counted from the block's start": ("logs/jsonl.py", "first += breaks", "first += 0"),
    "rows counted from the chunk's start": (
        "logs/parquet.py",
        "arange(done, done + batch.num_rows)",
        "arange(batch.num_rows)",
    ),
    "all prompts one": ("logs/prompt_groups.py", "len(self._known))", "0)"),
}

NOT_NEEDED = ("audit", "cli", "exact", "frameworks", "kernels", "reproduce", "train", "trl")


@contextmanager
def copied(folder, file="__init__.py", sound="", faulty=""):
    """`klgrad.logs` of a copy with the fault, under a name of its own, so that torch is not imported again."""
    copy = folder / f"copy_{folder.name}"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", *NOT_NEEDED))
    (copy / "__init__.py").write_text("")  # without imports of the audit
    text = (copy / file).read_text(encoding="utf-8")
    assert not sound or text.count(sound) == 1, f"{file} no longer has the line that this fault replaces"
    (copy / file).write_text(text.replace(sound, faulty) if sound else text, encoding="utf-8")
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        logs = importlib.import_module(f"{copy.name}.logs")
        logs.read.jsonl.BLOCK = 2000  # bytes, so that small files have several
        yield logs
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_fault_breaks_a_fact(mutation, tmp_path):
    with copied(tmp_path, *MUTATIONS[mutation]) as logs:
        assert next(broken(logs, tmp_path), None) is not None


@pytest.mark.slow
def test_a_copy_without_a_fault_breaks_none(tmp_path):
    with copied(tmp_path) as logs:
        assert list(broken(logs, tmp_path)) == []
