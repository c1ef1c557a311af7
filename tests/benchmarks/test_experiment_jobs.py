"""The jobs of the experiments in `benchmarks` have settings that the commands accept."""

import argparse
import importlib

import pytest

pytest.importorskip("trl")

import distill_runs as runs
import exp_async
import exp_discount as discounted
import exp_frontier as frontier
import exp_gradient as gradient
import exp_long
import exp_rethinking as rethought
import exp_reuse
import exp_stale_distill
import harness
import rl_runs

from klgrad.papers.asyncopd import stale_distillation
from klgrad.papers.comedy import asynchronous
from klgrad.papers.own import discount, reuse
from klgrad.papers.rethinking import language_model
from klgrad.papers.runs import ENOUGH_SEEDS, LAST, QUESTIONS
from klgrad.papers.tang_munos import fig7_frontier, long_runs
from klgrad.training.data import data_of
from klgrad.training.settings import parse

COMMANDS = dict.fromkeys(("exp_std", "exp_comedy", "exp_async", "exp_frontier", "exp_rethinking", "exp_long"), "train")
COMMANDS |= dict.fromkeys(("exp_stale_distill", "exp_reuse", "exp_discount"), "distill")


@pytest.mark.filterwarnings("ignore::klgrad.trl.MeaningWarning")  # some arms are unsound on purpose
@pytest.mark.parametrize("name", COMMANDS)
def test_every_job_is_accepted(name, tmp_path):
    jobs = importlib.import_module(name).jobs(argparse.Namespace(model=tmp_path, runs=tmp_path))
    assert len({job.name for job in jobs}) == len(jobs)
    for job in (job for job in jobs if job.settings["seed"] == 0):
        parsed(COMMANDS[name], job, tmp_path)  # raises otherwise


def parsed(command, job, folder):
    return parse(command, [*job.flags, "--output_dir", str(folder / "run"), "--bf16", "false"])


def test_the_studies_know_the_arms_of_the_experiments():
    assert set(stale_distillation.ARMS) == set(exp_stale_distill.ARMS)
    named = {arm for arms in stale_distillation.COSTS_MORE.values() for arm in arms}
    assert named | {arm for arm, _ in stale_distillation.COSTS_LITTLE.values()} <= set(exp_stale_distill.ARMS)
    assert {age for pair in stale_distillation.COMPARED.values() for age in pair} == set(exp_stale_distill.STALE)
    assert {arm for _, *arms in discount.NEARER.values() for arm in arms} <= set(discounted.ARMS)
    pairs = (*discount.BASELINES, *discount.SAMPLED)
    assert {*discount.RISING, *(arm for pair in pairs for arm in pair)} == set(discounted.ARMS)
    assert {discount.LARGE, discount.SMALL} == set(map(str, discounted.BATCHES))
    assert gradient.ROWS == discount.BATCH
    assert runs.UPDATES == LAST


def test_the_studies_know_the_arms_of_the_experiments_with_a_reward():
    assert set(asynchronous.ARMS) == {*exp_async.UNCORRECTED, *exp_async.CONTROL, *exp_async.CORRECTED}
    assert set(asynchronous.ARMS) == set(asynchronous.LABELS)
    assert (set(asynchronous.CORRECTED), {asynchronous.CONTROL}) == (set(exp_async.CORRECTED), set(exp_async.CONTROL))
    assert (set(asynchronous.LAGS), asynchronous.LAST) == (set(map(str, exp_async.LAGS)), exp_async.UPDATES)
    assert asynchronous.LONG_LAST == exp_async.LONG_UPDATES
    assert set(asynchronous.COEFFICIENTS) == {str(exp_async.COEF), "0.0"}
    assert set(asynchronous.BETWEEN) == set(map(str, exp_async.BETWEEN))
    assert set(asynchronous.BETWEEN_COEFFICIENTS) == set(map(str, exp_async.BETWEEN_COEFFICIENTS))
    assert set(language_model.LABELS) == set(rethought.ARMS)
    assert {arm for _, *arms in language_model.HIGHER.values() for arm in arms} <= set(rethought.ARMS)
    assert set(language_model.RATES) == {f"{rate:g}" for rate in rethought.RATES}
    assert (language_model.LAST, language_model.EVERY) == (rl_runs.UPDATES, rl_runs.EVERY)
    assert set(frontier.ARMS) <= set(fig7_frontier.ARMS)
    assert fig7_frontier.LAST == rl_runs.UPDATES


def test_the_study_of_long_runs_knows_its_arms_and_evaluations():
    arms = {*exp_long.ARMS, *exp_long.POOR, *exp_long.DIVIDED}
    assert set(long_runs.WORDS) == {*long_runs.LABELS, *long_runs.POOR} == arms
    evaluated = range(0, exp_long.UPDATES + 1, exp_long.EVERY)
    assert long_runs.EARLY in evaluated
    assert list(evaluated)[-2:] == [long_runs.BEFORE_LAST, long_runs.LAST]
    assert len(exp_long.SEEDS) >= ENOUGH_SEEDS


def test_the_study_of_reuse_knows_its_arms_and_evaluations(tmp_path):
    given = argparse.Namespace(model=tmp_path)
    jobs = [*exp_reuse.sweep(given), *exp_reuse.small(given), *exp_reuse.trl_sweep(given)]
    assert len({job.name for job in jobs}) == len(jobs)
    labels = [{key: str(x) for key, x in job.settings.items()} for job in jobs]
    not_drawn = {reuse.ARM.format_map(label) for label in reuse.labelled(labels)} - set(reuse.ARMS)
    assert not_drawn == {"trl-jsd 1 256", "trl-reverse 1 64"}
    assert set(reuse.ARMS) == {arm for _, _, arms in reuse.PANELS.values() for arm in arms}
    assert {arm for pair in reuse.NEARER.values() for arm in pair} <= set(reuse.ARMS)
    assert runs.COMMON["per_device_train_batch_size"] == exp_reuse.WHOLE == int(reuse.WHOLE_BATCH)
    for job, label in zip(jobs, labels, strict=True):
        flag = lambda name, flags=job.flags: flags[flags.index(f"--{name}") + 1]
        assert (flag("per_device_train_batch_size"), flag("num_iterations")) == (label["completions"], label["uses"])
        updates = range(0, int(flag("max_steps")) + 1, job.settings["every"])
        evaluated = [reuse.completions_of({**label, "update": update}) for update in updates]
        assert evaluated == [0, reuse.HALF // 2, reuse.HALF, reuse.HALF + reuse.HALF // 2, reuse.ALL], job.name


def test_the_questions_of_an_evaluation(tmp_path):
    """Right answers of an evaluation are judged by the number of its questions."""
    job = exp_stale_distill.jobs(argparse.Namespace(model=tmp_path, runs=tmp_path))[0]
    settings = parsed("distill", job, tmp_path)
    found = data_of(settings.run, settings.training.seed, conversational=True)
    assert sum(len(each.rows) for each in found.evaluation) == QUESTIONS


def test_the_seeds_of_a_discount_have_its_best_rate(tmp_path):
    kls = {("6e-4", 40, 0): 2.0, ("3e-4", 40, 0): 0.5, ("1e-4", 40, 0): 0.7}
    kls |= {("1e-4", 30, 0): 0.1, ("9e-4", 40, 0): float("nan"), ("6e-4", 40, 1): 0.1}
    same = {"arm": "exact-0", "completions": 64}
    names = ("learning_rate", "update", "seed")
    rows = [{**same, **dict(zip(names, key, strict=True)), "kl_per_token": kl} for key, kl in kls.items()]
    harness.write(rows, tmp_path / "discount_sweep.csv")
    jobs = discounted.seeds(argparse.Namespace(model=tmp_path, runs=tmp_path, out=tmp_path))
    assert [job.name for job in jobs] == [f"exact-0_64_0.0003_{seed}" for seed in (1, 2, 3)]
