"""An evaluation measures, and training does not notice it."""

import itertools
import math
import random
from dataclasses import replace

import numpy
import pytest
import torch
from training.conftest import read, same_weights
from training.small import SMALL, arguments

from klgrad.errors import MeaningError, SettingError
from klgrad.support import finite
from klgrad.training.build import build, models_of
from klgrad.training.evaluate import SAMPLES, apart_from_rng as apart, mean_reward
from klgrad.training.report import score
from klgrad.training.run import evaluation_line
from klgrad.training.settings import parse
from klgrad.trl.compat import tokenize_prompts

pytestmark = [pytest.mark.filterwarnings("ignore")]


def test_random_numbers_go_on_as_if_nothing_had_been_drawn():
    drawn = lambda: (random.random(), numpy.random.rand(), float(torch.rand(())))
    seeded = lambda: [seed(1) for seed in (random.seed, numpy.random.seed, torch.manual_seed)]
    seeded()
    expected = drawn(), drawn()
    seeded()
    first = drawn()
    with apart(7):
        inside = drawn()
    with apart(7):
        assert drawn() == inside
    assert (first, drawn()) == expected
    assert inside not in expected


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "distill"])
def test_training_is_the_same_with_and_without(command, run, tmp_path):
    for every, name in ((0, "without"), (1, "with")):
        run(command, tmp_path / name, eval_every=every, max_steps=3)
    assert same_weights(tmp_path / "without", tmp_path / "with")
    rows = read(tmp_path / "with" / "history.jsonl")
    assert [row["step"] for row in rows if "evaluation" in row] == [0, 1, 2, 3]


@pytest.fixture
def trainer(model, tmp_path):
    def made(command="train", **settings):
        which = {"model": model} if command == "train" else {"model": f"{model}:2", "teacher": model}
        settings = parse(command, arguments(**{**SMALL, **which, "output_dir": tmp_path, **settings}))
        return build(settings, models_of(settings))

    return made


def test_a_mean_over_few_prompts_has_an_interval_by_student_and_over_one_none():
    found = mean_reward([1.0, 0.0, 0.5, 0.5])
    assert found["reward"] == 0.5
    assert found["standard_error"] == pytest.approx(math.sqrt(1 / 6) / 2)
    assert found["interval"] == pytest.approx([0.5 - 3.182446 * found["standard_error"], 1.149615], abs=1e-5)
    alone = mean_reward([0.25])
    assert math.isnan(alone["standard_error"])
    assert score(alone) == score(finite(alone)) == "0.250"
    kl = {"per_token": {"mean": 0.5, "standard_error": None}}
    assert evaluation_line({"domains": {"in": alone}, "kl": kl}) == "in-domain 0.250  KL 0.5 nats per token"


@pytest.mark.parametrize(("right", "interval"), [(0, [0.0, 0.2425]), (3, [0.0889, 0.5323]), (12, [0.7575, 1.0])])
def test_a_share_of_right_answers_has_the_interval_of_a_proportion(right, interval):
    """Not [0, 0] for none of 12, and not below 0 for 3 of 12; by Wilson's formula."""
    assert mean_reward([1.0] * right + [0.0] * (12 - right))["interval"] == pytest.approx(interval, abs=1e-4)


@pytest.mark.slow
def test_it_repeats_and_leaves_the_trainer_as_it_was(trainer):
    made, evaluator = trainer()
    made.model.train()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = evaluator(made), evaluator(made)
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert made.model.training
    assert made.generation_config.do_sample


@pytest.mark.slow
def test_it_tells_its_progress_and_keeps_completions(trainer):
    made, evaluator = trainer(eval_size=5, per_device_train_batch_size=4)
    batches = []
    samples = evaluator(made, batches.append)["samples"]
    assert sum(batches) == evaluator.count == sum(len(each.rows) for each in evaluator.sets)
    assert batches[:2] == [4, 1]
    for each in evaluator.sets:
        own = [sample for sample in samples if sample["set"] == each.name]
        assert [sample["prompt"] for sample in own] == [row["prompt"] for row in each.rows[:SAMPLES]]
        assert all(isinstance(sample["completion"], str) and isinstance(sample["reward"], float) for sample in own)


@pytest.mark.slow
def test_a_model_is_at_0_from_itself_and_away_from_another(trainer):
    made, evaluator = trainer(kl_estimator="exact")
    assert evaluator(made)["kl"]["per_token"]["mean"] == pytest.approx(0, abs=1e-6)
    with torch.no_grad():
        for p in made.model.parameters():
            p.mul_(1.5)
    found = evaluator(made)["kl"]
    assert found["per_token"]["estimator"] == "exact"
    low, high = found["per_token"]["interval"]
    assert low < found["per_token"]["mean"] < high
    assert found["per_token"]["mean"] > 0.01
    assert found["per_sequence"]["mean"] > found["per_token"]["mean"]


def next_log_probs(model, prompt, completion):
    """(T, V) after the prompt and after each token."""
    ids = torch.tensor([[*prompt, *completion]])
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def prompts_of(trainer, task):
    return tokenize_prompts(trainer, [row["prompt"] for row in task.rows])


def test_greedy_is_the_likeliest(trainer):
    made, evaluator = trainer()
    task = evaluator.sets[0]
    completions = evaluator.sample(made, task.rows, greedily=True)
    for prompt, completion in zip(prompts_of(made, task), completions, strict=True):
        assert next_log_probs(made.model, prompt, completion).argmax(-1).tolist() == completion
    assert made.generation_config.do_sample


@pytest.mark.slow
def test_greedy_decoding_is_reported_beside_sampling_and_changes_none_of_it(trainer):
    made, evaluator = trainer()
    alone, both = evaluator(made), replace(evaluator, greedy=True)(made)
    greedy = {name: both["sets"].pop(name) for name in list(both["sets"]) if name.endswith(", greedy")}
    assert both == alone
    for task in evaluator.sets:
        right = evaluator.scores(made, task.rows, evaluator.sample(made, task.rows, greedily=True))
        assert greedy[f"{task.name}, greedy"] == {"domain": task.domain, **mean_reward(right)}


@pytest.mark.slow
def test_a_greedy_run(run, tmp_path):
    text = run("train", tmp_path / "run", eval_greedy=True, max_steps=1)
    assert "addition (in-domain, 4)" in text
    assert "addition, greedy (in-domain, 4)" in text
    with pytest.raises(SettingError, match="`eval_greedy` without `use_vllm`"):
        run("train", tmp_path / "other", eval_greedy=True, use_vllm=True)


@pytest.mark.slow
def test_rewards_are_of_the_right_rows(trainer, monkeypatch):
    """A model that writes each question's answer scores 1, one that writes another's does not."""
    made, evaluator = trainer(eval_size=8)
    for each in evaluator.sets[:2]:
        for shift, expected in ((0, 1.0), (1, 0.0)):
            answers = [row["answer"] for row in each.rows]
            wrong = [a if shift == 0 else str(int(a) + 1) for a in answers]
            texts = iter([made._tokenizer(a)["input_ids"] for a in wrong])
            monkeypatch.setattr(made, "_generate_single_turn", lambda p, *_, t=texts: ([next(t) for _ in p], None))
            one = type(evaluator)([each], evaluator.rewards, evaluator.weights, 0)(made)
            assert one["sets"][each.name]["reward"] == expected


@pytest.mark.slow
def test_a_dataset_with_completions_of_its_own(run, tmp_path, jsonl):
    """TRL does not hand them to reward functions, and neither does an evaluation."""
    own = {"completion_ids": [1], "completion": "x"}
    task = jsonl([{"prompt": f"Compute {i} + 1", "answer": str(i + 1), **own} for i in range(20)])
    run("train", tmp_path / "run", task=task, reward="klgrad.training.data:correct", max_steps=1)


def test_too_few_prompts_for_one_update(run, tmp_path, jsonl):
    task = jsonl([{"prompt": f"Compute {i} + 1", "answer": str(i + 1)} for i in range(5)])
    given = {"task": task, "reward": "klgrad.training.data:correct", "eval_size": 0}
    with pytest.raises(MeaningError, match=r"at least 8 prompts.*received 5; .*not one update would be made"):
        run("train", tmp_path / "run", **given, max_steps=3, per_device_train_batch_size=32)
    with pytest.raises(MeaningError, match=r"at least 2 prompts.*received 1; "):
        run("train", tmp_path / "run", train_size=1)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["exact", "k1"])
def test_a_distillation_is_compared_with_its_teacher(estimator, trainer):
    """By sums over all entries, of the forward KL on the teacher's completions and of the top-k mass; else by k3."""
    made, evaluator = trainer("distill", kl_estimator=estimator)
    first, again = evaluator(made)["distillation"], evaluator(made)["distillation"]
    assert first == again
    (name,) = evaluator.comparison.teachers
    assert set(first["rewards"]) == {"student", name}
    kept, task, models = evaluator.comparison.kept, evaluator.sets[0], (made.model, made.ref_model)
    prompt, greedy = prompts_of(made, task)[0], kept[name, task.name, True][0][0]
    assert next_log_probs(made.ref_model, prompt, greedy).argmax(-1).tolist() == greedy
    kl, mass, counts = [], [], []
    for task in evaluator.sets:
        taught, own = (itertools.chain(*kept[whose, task.name, False]) for whose in (name, "student"))
        for prompt, by_teacher, by_student in zip(prompts_of(made, task), taught, own, strict=True):
            log_p, log_q = (next_log_probs(one, prompt, by_teacher) for one in models)
            exact = (log_q.exp() * (log_q - log_p)).sum(-1)
            away = (log_p - log_q).gather(-1, torch.tensor(by_teacher)[:, None])[:, 0]
            kl += (exact if estimator == "exact" else away.exp() - 1 - away).tolist()
            log_p, log_q = (next_log_probs(one, prompt, by_student) for one in models)
            mass += log_p.exp().gather(-1, log_q.topk(16).indices).sum(-1).tolist()
            counts.append(len(by_student))
    assert first["forward_kl"]["per_token"]["mean"] == pytest.approx(sum(kl) / len(kl), rel=1e-5)
    if estimator == "k1":
        assert "overlap" not in first
        return
    assert first["overlap"]["student_on_teachers"]["mean"] == pytest.approx(sum(mass) / sum(counts), rel=1e-5)


@pytest.mark.slow
def test_a_run_with_two_teachers(run, model, tmp_path):
    models = {"model": f"{model}:2", "teacher": f"big={model},small={model}:1"}
    text = run("distill", tmp_path / "run", max_steps=2, **models, kl_divergence="jensen-shannon(0.2)")
    for words in ("jensen-shannon(0.2)", "big, greedy", "small, sampled", "student, greedy"):
        assert words in text
