"""Faults put into a copy of the package on purpose: each must break a fact about logs."""

import importlib
import sys
from contextlib import contextmanager

import pytest
from logs.facts import broken
from mutants import copy_with_fault, module_in

MUTATIONS = {
    "errors without the correction for few clusters": (
        "core.result.RatioSums.estimates", "(self.square / left)", "(self.square)"),
    "a prompt's completions counted as independent": (
        "reports.Totals.estimates", "self._clustered() or self._sums", "self._sums"),
    "batches about means of their own": (
        "core.result.RatioSums._about", "off = mean - _ratio(self.total, self.count)", "off = 0 * mean"),
    "token ratios for prefix ratios": (
        "reports.Ratios.add", "prefix_ratio(rollout)[live]", "token_ratio(rollout)[live]"),
    "a ratio without a token": (
        "reports.Ratios.add", "sequence_ratio(rollout)[live.any(-1), 0]", "sequence_ratio(rollout)[:, 0]"),
    "the mismatch the other way round": (
        "reports.MismatchSums.add", "away = -rollout.log_ratio", "away = rollout.log_ratio"),
    "coefficients of a mean": ("logs.examination.coefficients", "else gradient * len(rollout.logp)", "else gradient"),
    "a sign of the difference": ("logs.examination.CoefficientSums.add", "(c - s) @ (c - s)", "(c + s) @ (c + s)"),
    "what is alive counted as dead": ("logs.examination.CoefficientSums.add", "c.abs() < DEAD", "c.abs() > DEAD"),
    "lengths with dead tokens": ("logs.reader.build", "lengths = counted[ends] - counted[ends - lengths]", "pass"),
    "padding taken for tokens": ("logs.examination._pad", "steps < lengths[:, None]", "steps <= lengths[:, None]"),
    "places among live tokens": ("logs.reader.Chunk.place", "token = int(torch.nonzero(live)[token])", "pass"),
    "the other neighbour": (
        "logs.mismatch.Evidence.add", "(rollout.sampler_logp, rollout.logp, live)",
        "(rollout.logp, rollout.sampler_logp, live)"),
    "repeats of any token": ("logs.mismatch.Evidence._first_tokens", "& (y[1:] == y[:-1])", ""),
    "the ratio upside down": ("logs.mismatch._by_mean", "torch.expm1(-case.d)", "torch.expm1(case.d)"),
    "limits on the other side": ("logs.mismatch._beyond", "limit - y if a > 1 else y - limit", "y - limit"),
    "limits of the log-prob": ("logs.mismatch.possible_temperatures", "x - torch.log(-torch.expm1(x))", "x - 0"),
    "a filter where the mass is above 1": ("logs.mismatch.find_filter", "mean + 5 * error < 1", "mean - 5 * error > 1"),
    "nothing beside a filter": ("logs.mismatch._of_contexts_alone", "line.within < 0.05", "line.within > 0.05"),
    "noise taken for what is systematic": ("logs.mismatch._find_randomness", "case.noise > 0.5", "case.noise < 0.5"),
    "every number a bf16 number": (
        "logs.mismatch._find_rounding", "nonzero.to(dtype).double() == nonzero", "nonzero == nonzero"),
    "lines counted from 0": ("logs.reader._records", "enumerate(lines, 1)", "enumerate(lines)"),
    "rows counted from the batch's start": (
        "logs.reader._decode_parquet", "arange(done, done + batch.num_rows)", "arange(batch.num_rows)"),
    "all prompts one": ("logs.reader.Log._number", "len(known))", "0)"),
}  # fmt: skip


@contextmanager
def copied(folder, *fault):
    """`klgrad.logs` of a copy with the fault, under a name of its own, so that torch is not imported again."""
    copy = copy_with_fault(folder, f"copy_{folder.name}", fault or None)
    (copy / "__init__.py").write_text("")  # without imports of the audit
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        logs = importlib.import_module(f"{copy.name}.logs")
        vars(module_in(copy.name, "klgrad.logs.reader"))["DECODED_ROWS"] = 16  # so that small files have several parts
        yield logs
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_fault_breaks_a_fact(mutation, tmp_path):
    where, sound, faulty = MUTATIONS[mutation]
    with copied(tmp_path, f"klgrad.{where}", sound, faulty) as logs:
        assert next(broken(logs, tmp_path), None) is not None


@pytest.mark.slow
def test_a_copy_without_a_fault_breaks_none(tmp_path):
    with copied(tmp_path) as logs:
        assert list(broken(logs, tmp_path)) == []
