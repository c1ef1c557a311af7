"""TRL's distillation with this package's kernels: the same loss, gradients and training, for every beta."""

import warnings

import pytest
import tiny
import torch
import transformers
from peft import LoraConfig
from some import first
from tolerances import EXACT, SAME_STEPS, SINGLE, Tol
from trl import DistillationConfig, DistillationTrainer as TRLDistillationTrainer
from trl.trainer import distillation_trainer as trl_module

from klgrad.errors import KernelInputError
from klgrad.kernels import Head
from klgrad.kernels.fused_statistics import logits as logits_of
from klgrad.trl import DistillationTrainer
from klgrad.trl.compat import padded
from klgrad.trl.distillation import divergence_loss

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of TRL's experimental part
    from trl.experimental.gkd import GKDTrainer

pytestmark = pytest.mark.filterwarnings("ignore")

FLOAT32 = Tol(2e-5, 1e-7, "TRL subtracts float32 sums as large as a log-sum-exp; these kernels add Bregman terms")


def case(dtype=torch.float32, bias=True):
    """Hidden states and heads of a student and a wider teacher, (B, T) = (3, 5) and V = 40, with some tokens masked."""
    generator = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    student = [new(3, 5, 8), new(40, 8), new(40) if bias else None]
    teacher = [new(3, 5, 12), new(40, 12), new(40) if bias else None]
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1]])
    leaves = [x.requires_grad_() for x in student if x is not None]
    return student, teacher, mask, leaves


def gradients(loss, leaves):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, leaves)])


NUMBERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "scale": 0.25},
    {"softcap": 2.0, "scale": 1.5, "temperature": 0.9},
]
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("items", [None, 7, torch.tensor(5.0)], ids=str)
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_trl(beta, items, numbers, bias):
    (h, w, b), (ht, wt, bt), mask, leaves = case(bias=bias)
    scale, cap, temperature = (numbers.get(name) for name in ("scale", "softcap", "temperature"))
    theirs = trl_module._chunked_divergence_loss(
        h, ht, w, wt, mask, beta, items, b, bt, scale or 1.0, scale or 1.0, cap, cap, temperature or 1.0
    )
    ours = divergence_loss(h, Head(w, b, **numbers), ht, Head(wt, bt, **numbers), mask, beta, items)
    for mine, other in zip(ours, theirs, strict=True):
        FLOAT32.check(mine, other)
    FLOAT32.check_vector(gradients(ours[0], leaves), gradients(theirs[0], leaves))


@pytest.mark.parametrize("beta", BETAS)
def test_in_float64_they_are_those_of_gkd(beta):
    """TRL's distillation computes in float32, whatever the inputs are; its GKD does not."""
    (h, w, b), (ht, wt, bt), mask, leaves = case(torch.float64)
    head, teacher = Head(w, b), Head(wt, bt)
    z, zt = logits_of(h, head), logits_of(ht, teacher)
    labels = torch.where(mask == 1, 0, -100)
    theirs = GKDTrainer.generalized_jsd_loss(z, zt, labels, beta, 0.7, num_items_in_batch=int(mask.sum()))
    head, teacher = Head(w, b, temperature=0.7), Head(wt, bt, temperature=0.7)
    found = divergence_loss(h, head, ht, teacher, mask, beta)
    EXACT.check(found[0], theirs)
    EXACT.check_vector(gradients(found[0], leaves), gradients(theirs, leaves))
    log_p = (z / 0.7).log_softmax(-1)
    EXACT.check(found[1], -((log_p.exp() * log_p).sum(-1) * mask).sum())


def test_a_batch_without_live_tokens_has_no_loss():
    (h, w, b), (ht, wt, bt), mask, leaves = case()
    found = divergence_loss(h, Head(w, b), ht, Head(wt, bt), torch.zeros_like(mask), 1.0)
    assert [float(x) for x in found] == [0, 0, 0]
    assert not gradients(found[0], leaves).any()


def trainer_of(kind, path, student=None, peft_config=None, **settings):
    shared = {name: value for name, value in tiny.SETTINGS.items() if name != "num_generations"}
    args = DistillationConfig(str(path), **{**shared, **settings})
    data = {"train_dataset": tiny.prompts(), "processing_class": tiny.tokenizer()}
    return kind(student or tiny.folder(), tiny.folder(hidden=48), args, **data, peft_config=peft_config)


SETTINGS = [
    {"beta": 1.0},
    {"beta": 0.5},
    {"beta": 0.0},
    {"beta": 0.1, "temperature": 0.7},
    {"beta": 1.0, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    {"beta": 0.5, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", first(SETTINGS, (SETTINGS[0], SETTINGS[1], SETTINGS[-1])), ids=str)
def test_training_is_that_of_trl(settings, tmp_path):
    trained = []
    for kind in (DistillationTrainer, TRLDistillationTrainer):  # building a trainer sets the seed
        trainer = trainer_of(kind, tmp_path / kind.__module__, **settings)
        before = tiny.weights(trainer)
        trainer.train()
        trained.append(trainer)
    ours, theirs = trained
    assert (tiny.weights(theirs) - before).abs().max() > 1e-3
    SAME_STEPS.check_vector(tiny.weights(ours) - before, tiny.weights(theirs) - before)
    for name in ("loss", "entropy"):
        SAME_STEPS.check(torch.tensor(tiny.logged(ours, name)), torch.tensor(tiny.logged(theirs, name)))


@pytest.mark.slow
def test_the_kernels_are_what_computes_it(tmp_path, monkeypatch):
    """Else this file would compare TRL with itself."""
    ours, theirs = (trainer_of(kind, tmp_path, max_steps=1) for kind in (DistillationTrainer, TRLDistillationTrainer))
    monkeypatch.setattr(trl_module, "_chunked_divergence_loss", lambda *args, **kwargs: 1 / 0)
    ours.train()
    with pytest.raises(ZeroDivisionError):
        theirs.train()


GEMMA = {
    "vocab_size": len(tiny.WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "lru_width": 32, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None, "use_cache": False,
}  # fmt: skip


def recurrent_gemma(cap):
    torch.manual_seed(0)
    model = transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**GEMMA, logits_soft_cap=cap))
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    return model


def first_loss(trainer):
    """The loss of one batch by the trainer, and by the models' own logits."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 30, (4, 9), generator=generator)
    inputs = padded(trainer, ids[:, :3].tolist(), ids[:, 3:].tolist())
    models = trainer.model.eval(), trainer.teacher_model.eval()
    with torch.no_grad():
        found = trainer.compute_loss(trainer.model, inputs)
        log_p, log_q = (each(input_ids=ids, use_cache=False).logits[:, 2:-1].log_softmax(-1) for each in models)
    return found, (log_p.exp() * (log_p - log_q)).sum(-1).mean()


@pytest.mark.slow
def test_a_cap_that_trl_does_not_know(tmp_path):
    """TRL reads `final_logit_softcapping`, and RecurrentGemma calls its cap `logits_soft_cap`."""
    student = recurrent_gemma(2.0)
    found, expected = first_loss(trainer_of(DistillationTrainer, tmp_path / "ours", student))
    SINGLE.check(found, expected)
    found, expected = first_loss(trainer_of(TRLDistillationTrainer, tmp_path / "theirs", student))
    assert abs(found - expected) > 0.1 * expected


class Capped(torch.nn.Linear):
    """A head whose cap no field of the configuration names."""

    def forward(self, input):
        return 0.1 * torch.tanh(super().forward(input) / 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["model", "teacher_model"])
def test_a_head_that_is_read_wrongly_is_refused_before_the_first_step(whose, tmp_path):
    trainer = trainer_of(DistillationTrainer, tmp_path)
    before = tiny.weights(trainer)
    getattr(trainer, whose).get_output_embeddings().__class__ = Capped
    with pytest.raises(KernelInputError, match="root mean square difference"):
        trainer.train()
    assert torch.equal(tiny.weights(trainer), before)
