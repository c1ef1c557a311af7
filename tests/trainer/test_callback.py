"""`KLCallback` reports the KL of a stock run, and changes no bit of it."""

import copy
import inspect
import re
import runpy
import warnings
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from overwriting import Overwriting
from peft import LoraConfig
from some import first
from tolerances import SINGLE
from transformers import Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.logs import examine
from klgrad.trl import CallbackWarning, KLCallback, KLConfig, KLTrainer, callback as kl_callback, reference
from klgrad.trl.compat import CompletionRows, completion_log_probs, padded
from klgrad.trl.reference import Passes, Reference, StartWeights

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error::klgrad.trl.CallbackWarning")]
K3 = "kl/reverse/k3/per_token"


def run(output, *callbacks, kind=(GRPOTrainer, GRPOConfig), prepare=lambda _: None, **settings):
    make, configure = kind
    made = tiny.trainer(make, configure, output, **settings)
    prepare(made)
    for callback in callbacks:
        made.add_callback(callback)
    made.train()
    return made


def overwriting(trainer):
    """Layers that overwrite what they saved."""
    for layer in trainer.model.model.layers:
        layer.mlp.register_forward_hook(lambda _, given, out: Overwriting.apply(out))


SEVERAL = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 6}
LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
CASES = {
    "no KL": ({}, False),
    "TRL's KL": ({"beta": 0.3, "temperature": 0.7}, True),
    "several updates": (SEVERAL, False),
    "mixed precision": ({"bf16": True, "beta": 0.3}, False),
    "adapters": ({"peft_config": LORA}, True),
    "overwriting": ({"beta": 0.3, "prepare": overwriting}, False),
    "RLOO": ({"kind": (RLOOTrainer, RLOOConfig), "beta": 0.3}, False),
    "KLTrainer": ({"kind": (KLTrainer, KLConfig), "kl_coef": 0.3}, False),
}
"""Settings, and whether the exact KL is reported too."""
TIMES = re.compile("time|runtime|per_second")


@pytest.mark.slow
@pytest.mark.parametrize("case", first(CASES, ("TRL's KL", "several updates", "adapters", "overwriting")))
def test_the_run_is_the_same_to_the_last_bit(case, tmp_path):
    settings, exact = CASES[case]
    steps = [1, 5] if settings is SEVERAL else [1, 2, 3]
    plain = run(tmp_path / "without", **copy.deepcopy(settings))
    watched = run(tmp_path / "with", KLCallback(1, exact=exact), **copy.deepcopy(settings))
    assert torch.equal(tiny.weights(plain), tiny.weights(watched))
    for before, after in zip(plain.state.log_history, watched.state.log_history, strict=True):
        assert before.items() <= {**after, **{name: x for name, x in before.items() if TIMES.search(name)}}.items()
    assert tiny.logged(watched, "kl/measured_step") == steps
    values = tiny.logged(watched, K3)
    assert values[0] == pytest.approx(0, abs=1e-6)  # the policy is its own reference
    assert min(values[1:]) > 1e-5
    assert len(tiny.logged(watched, f"{K3}/standard_error")) == len(steps)
    if exact:
        assert min(tiny.logged(watched, "kl/reverse/exact/per_token")[1:]) > 1e-5
    assert not vars(watched).keys() & {"_prepare_inputs", "_generate_and_score_completions", "compute_loss", "log"}


@pytest.mark.slow
def test_every_form_of_the_reference_gives_the_kl_that_trl_reports(tmp_path):
    """TRL's `kl` is k3 per token of the same completions; with beta = 0 the same run has none."""
    start = tiny.trainer(GRPOTrainer, GRPOConfig, tmp_path).model
    found = run(tmp_path, KLCallback(1, reference=copy.deepcopy(start)), beta=0.3, temperature=0.7, max_steps=2)
    SINGLE.check(torch.tensor(tiny.logged(found, K3)), torch.tensor(tiny.logged(found, "kl")))
    given, kept = (
        run(tmp_path / name, KLCallback(1, reference=model), max_steps=2)
        for name, model in (("without beta, given", copy.deepcopy(start)), ("without beta, kept", None))
    )
    SINGLE.check(torch.tensor(tiny.logged(kept, K3)), torch.tensor(tiny.logged(given, K3)))


def moved_trainer(output, **settings):
    """A trainer whose policy is away from its start weights, and a padded batch."""
    trainer = tiny.trainer(GRPOTrainer, GRPOConfig, output, **settings)
    start = StartWeights(trainer.model)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return trainer, start, padded(trainer, [[4, 5], [7, 8, 9]], [[3, 9, 9, 30, 1], [12, 1]])


@pytest.mark.parametrize("free", [0, 2**40])
def test_free_memory_of_a_gpu_saves_passes_and_copies_and_changes_no_number(free, tmp_path, monkeypatch):
    trainer, start, batch = moved_trainer(tmp_path)
    (expected,) = Passes(trainer, Reference(trainer, None, start), exact=False)([batch])
    before, own = tiny.weights(trainer), trainer.model.get_input_embeddings().weight.data_ptr()
    monkeypatch.setattr(reference, "free_bytes", lambda _: free)
    monkeypatch.setattr(reference, "LOGITS", 1)
    calls, counted = [], trainer.model.register_forward_hook(lambda *_: calls.append(1))
    (found,) = Passes(trainer, Reference(trainer, None, start), exact=False)([batch])
    counted.remove()
    assert len(calls) == (2 if free else 4)  # two completions, by two models
    for name in ("logp", "ref_logp"):
        SINGLE.check(found[name], expected[name])
    assert torch.equal(tiny.weights(trainer), before)
    assert trainer.model.get_input_embeddings().weight.data_ptr() == own


@pytest.mark.parametrize("exact", [False, True])
def test_log_probs_and_kls_against_the_whole_vocabulary(exact, tmp_path):
    trainer, start, batch = moved_trainer(tmp_path, temperature=0.7)
    before, rows = tiny.weights(trainer), CompletionRows.of(batch)

    @torch.no_grad()
    def by_hand():
        trainer.model.eval()
        logits = trainer.model(input_ids=rows.ids, attention_mask=rows.attention).logits[:, 2:-1].double()
        trainer.model.train()
        return (logits / 0.7).log_softmax(-1)

    policy = by_hand()
    with start.loaded(trainer.model):
        ref = by_hand()
    (found,) = Passes(trainer, Reference(trainer, None, start), exact)([batch])
    live = batch["completion_mask"].bool()
    token = lambda x: x.gather(-1, batch["completion_ids"][..., None])[..., 0][live]
    SINGLE.check(found["logp"][live], token(policy))
    SINGLE.check(found["ref_logp"][live], token(ref))
    if exact:
        SINGLE.check(found["token_reverse_kl"][live], (policy.exp() * (policy - ref)).sum(-1)[live])
        SINGLE.check(found["token_forward_kl"][live], (ref.exp() * (ref - policy)).sum(-1)[live])
    assert torch.equal(tiny.weights(trainer), before)
    assert trainer.model.training
    assert "question" not in str(trainer.model.forward)


def test_a_failure_while_the_start_weights_are_loaded_restores_the_policy(tmp_path):
    trainer, start, _ = moved_trainer(tmp_path)
    before = tiny.weights(trainer)
    loaded = start.loaded(trainer.model)
    loaded.__enter__()
    assert not torch.equal(tiny.weights(trainer), before)
    assert not loaded.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert torch.equal(tiny.weights(trainer), before)


class Sampled(GRPOTrainer):
    """Has log-probs of a sampler that differ from the policy's by a quarter of a nat; one token could not be scored."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            batch["sampling_per_token_logps"] = completion_log_probs(self, self.model, batch)[0] - 0.25
        batch["sampling_per_token_logps"][0, 0] = torch.nan
        return batch


@pytest.mark.slow
def test_the_mismatch_to_the_sampler(tmp_path):
    found = run(tmp_path, KLCallback(1), kind=(Sampled, GRPOConfig), max_steps=1)
    tokens = 8 * tiny.logged(found, "length/mean")[0]
    SINGLE.check(tiny.logged(found, "kl/mismatch/k1/per_token")[0], -0.25 * (tokens - 1) / tokens)
    assert 0 < tiny.logged(found, "ratio/sequence/effective_sample_size")[0] < 1


# Does beta move the gradient?


class Dropped(tiny.LeavesTheKLOut, GRPOTrainer):
    """Pays for the KL and trains without it."""


class ValueOnly(Dropped):
    """Adds the KL without its gradient."""

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) + self.beta * inputs["ref_per_token_logps"].mean()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "moves"), [(GRPOTrainer, True), (Dropped, False), (ValueOnly, False)])
def test_whether_beta_moves_the_gradient(kind, moves, tmp_path):
    callback, settings = KLCallback(1), {"beta": 0.3, "max_steps": 2, "logging_steps": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CallbackWarning)
        found = run(tmp_path / "with", callback, kind=(kind, GRPOConfig), **settings)
    texts = [str(each.message) for each in caught if each.category is CallbackWarning]
    assert callback.beta_moves_gradient is moves
    assert tiny.logged(found, "kl/beta_moves_gradient") == [float(moves)]
    assert len(texts) == (not moves)
    if not moves:
        assert "expected a loss whose gradient depends on the reference, as beta=0.3 declares" in texts[0]
        assert f"from {kind.__name__}.compute_loss; remedy: the KL is left out" in texts[0]
    if kind is not Dropped:
        return
    plain = run(tmp_path / "without", kind=(kind, GRPOConfig), **settings)
    assert torch.equal(tiny.weights(plain), tiny.weights(found))
    assert tiny.logged(plain, "entropy") == tiny.logged(found, "entropy")  # the look leaves no metrics


# Failures


@pytest.mark.slow
def test_a_failure_is_reported_and_training_goes_on(tmp_path, monkeypatch):
    def fail(self, batches):
        torch.rand(3)
        raise RuntimeError("out of something")

    plain = run(tmp_path / "without", max_steps=2)  # the second samples with random numbers after the failure
    monkeypatch.setattr(kl_callback.Passes, "_log_probs", fail)
    with pytest.warns(CallbackWarning, match="no KL of step 1 is reported.*: RuntimeError: out of something") as told:
        found = run(tmp_path / "with", KLCallback(1), max_steps=2)
    assert len([each for each in told if each.category is CallbackWarning]) == 1  # not at every measurement
    assert torch.equal(tiny.weights(plain), tiny.weights(found))
    assert not tiny.logged(found, K3)


@pytest.mark.slow
def test_a_run_of_which_only_the_start_is_measured_says_so(tmp_path):
    text = "more than every=3 updates; received 3, of which only the first is measured.*remedy: write a smaller every"
    with pytest.warns(CallbackWarning, match=text):
        run(tmp_path / "short", KLCallback(3), max_steps=3)
    run(tmp_path / "longer", KLCallback(3), max_steps=4)  # a warning would be an error


def test_a_trainer_without_completions(tmp_path):
    from transformers import AutoModelForCausalLM

    rows = [{"input_ids": [2, 3, 4], "labels": [2, 3, 4]}] * 4
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(tiny.folder())
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[KLCallback(1)])
    with pytest.warns(CallbackWarning, match="expected batches with prompt_ids.*received .*labels"):
        trainer.train()


def test_a_callback_that_no_trainer_has(tmp_path):
    callback, trainer = KLCallback(1), tiny.trainer(GRPOTrainer, GRPOConfig, tmp_path)
    with pytest.warns(CallbackWarning, match=r"expected a trainer that calls this callback; received none.*callbacks="):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)


@pytest.mark.slow
def test_a_second_training_is_observed_too(tmp_path):
    """Also after one that ended with an error, of which a callback is not told."""
    callback, trainer = KLCallback(1), tiny.trainer(GRPOTrainer, GRPOConfig, tmp_path, max_steps=1)
    trainer.add_callback(callback)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "compute_loss", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train()
    trainer.train()
    assert len(tiny.logged(trainer, K3)) == 1
    assert "_prepare_inputs" not in vars(trainer)


# Over several updates and files


@pytest.mark.slow
@pytest.mark.many
def test_rows_between_two_logs_are_pooled(tmp_path):
    each = run(tmp_path / "each", KLCallback(1), max_steps=2)
    both = run(tmp_path / "both", KLCallback(1), max_steps=2, logging_steps=2)
    assert tiny.logged(both, "kl/clusters") == [4]
    (mean,) = tiny.logged(both, "kl/reverse/k3/per_sequence")
    SINGLE.check(mean, sum(tiny.logged(each, "kl/reverse/k3/per_sequence")) / 2)


@pytest.mark.slow
def test_a_run_that_continues_keeps_its_reference_and_its_files(tmp_path):
    folder = tmp_path / "rollouts"
    saved = {"save_strategy": "steps", "save_steps": 2}
    run(tmp_path / "run", KLCallback(1, log_rollouts=folder), max_steps=3, **saved)
    trainer = tiny.trainer(GRPOTrainer, GRPOConfig, tmp_path / "run", max_steps=4, **saved)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.warns(CallbackWarning, match="expected a folder without files of another run"):
        run(tmp_path / "new", KLCallback(1, log_rollouts=folder))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    trainer.add_callback(KLCallback(1))
    with pytest.warns(CallbackWarning, match="the policy at step 2, from which the run continues"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    with_callback = partial(GRPOTrainer, callbacks=[KLCallback(1, log_rollouts=folder)])
    trainer = tiny.trainer(with_callback, GRPOConfig, tmp_path / "run", max_steps=4, **saved)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert [path.name[5:13] for path in sorted(folder.glob("step-*"))] == [f"0000000{i}" for i in range(1, 5)]
    first = next(row[K3] for row in trainer.state.log_history if row["step"] == 3 and K3 in row)
    assert first > 1e-3  # to the weights at the start, and not to those of the checkpoint


@pytest.mark.slow
def test_a_folder_that_cannot_be_used_does_not_stop_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(CallbackWarning, match="no log-probs are written in this run: "):
        found = run(tmp_path / "run", KLCallback(1, log_rollouts=tmp_path / "file"), max_steps=2)
    assert len(tiny.logged(found, K3)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GRPOTrainer, pytest.param(Sampled, marks=pytest.mark.many)])
def test_klgrad_logs_reads_the_files_back(kind, tmp_path):
    # Used twice, so that the batch has the policy's old log-probs, which must not be taken for a sampler's.
    callback = KLCallback(1, log_rollouts=tmp_path / "rollouts")
    found = run(tmp_path / "run", callback, kind=(kind, GRPOConfig), num_iterations=2)
    report = examine(tmp_path / "rollouts", by="step")
    assert "old_logp" in report.columns
    assert ("behavior_logp" in report.columns) == (kind is Sampled)
    assert [part.label for part in report.parts] == [1, 3]
    for name in (K3, f"{K3}/standard_error", "kl/reverse/k1/per_sequence", "length/mean"):
        read = torch.tensor([part.kl.metrics()[name] for part in report.parts])
        SINGLE.check(read, torch.tensor(tiny.logged(found, name)))


@pytest.mark.slow
def test_the_page_of_the_documentation(tmp_path, monkeypatch):
    """Its snippet runs, and its command reads what the snippet wrote."""
    page = (Path(__file__).parents[2] / "docs" / "logs.md").read_text(encoding="utf-8")
    snippet, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    command, *_ = re.findall(r"^klgrad (logs .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    args = GRPOConfig("run", **{**tiny.SETTINGS, "max_steps": 1})
    exec(snippet, {"model": tiny.folder(), "reward": tiny.reward, "args": args, "prompts": tiny.prompts()})
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert "By step" in result.output
    assert Path("kl.html").exists()
    for name, parameter in inspect.signature(KLCallback).parameters.items():
        assert re.search(rf"\| `{name}` \| `?{parameter.default}`? \|", page)
    for name in ("kl/measured_step", "kl/beta_moves_gradient", "standard_error"):
        assert name in page


@pytest.mark.slow
def test_the_logs_of_the_example_can_be_read(tmp_path, request):
    example = runpy.run_path(str(request.config.rootpath / "examples/callback.py"))
    example["main"](tmp_path)
    report = examine(tmp_path / "rollouts", by="step")
    assert [part.label for part in report.parts] == [1, 3, 5, 7, 9]
    kls = [part.kl.estimates[K3].mean for part in report.parts]
    assert kls[0] == 0 < kls[-1]


@pytest.mark.parametrize("can_pin", [False, True])
def test_start_weights_are_the_same_in_pinned_memory_or_where_there_is_none(can_pin, monkeypatch):
    def pin(x):
        if not can_pin:
            raise RuntimeError("cannot pin")
        return x.clone()

    layer = torch.nn.Linear(3, 4)
    kept, before = StartWeights(layer), layer.weight.detach().clone()
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    kept.pin()
    with torch.no_grad():
        layer.weight.add_(1.0)
    with kept.loaded(layer):
        assert torch.equal(layer.weight, before)
    assert torch.equal(layer.weight, before + 1.0)


def test_several_processes_make_the_same_number_of_passes_whatever_memory_is_free(tmp_path, monkeypatch):
    trainer, start, _ = moved_trainer(tmp_path)
    found = Passes(trainer, Reference(trainer, None, start), exact=False)
    monkeypatch.setattr(reference, "free_bytes", lambda _: 2**40)
    assert found._bytes_for_logits(torch.device("cpu")) == reference.MOST_LOGITS
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    assert found._bytes_for_logits(torch.device("cpu")) == reference.LOGITS
