"""What `KLTrainer` descends with any divergence, some entries, several teachers, and another prompt for the teacher.

The gradient of the trainer's own loss, on completions that it sampled, is compared with that of the definition over all
logits, in float64.
"""

import pytest
import tiny
import torch
from language_model import everything_in_float64
from tolerances import EXACT
from transformers import AutoModelForCausalLM

from klgrad.errors import MeaningError, SettingError
from klgrad.trl import KLConfig, KLTrainer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

WIDE, DEEP = tiny.folder(hidden=48), tiny.folder(layers=3)
BETA = 0.1


def terms(log_p, log_q, name):
    """Of the divergence by its definition, for each entry; with f(1) = f'(1) = 0."""
    p, q = log_p.exp(), log_q.exp()
    log_m = (BETA * q + (1 - BETA) * p).log()
    found = {
        "reverse": p * (log_p - log_q) - p + q,
        "forward": q * (log_q - log_p) - q + p,
        f"jensen-shannon({BETA})": BETA * q * (log_q - log_m) + (1 - BETA) * p * (log_p - log_m),
        "hellinger": 2 * (p.sqrt() - q.sqrt()) ** 2,
        "chi-square": (p - q) ** 2 / q / 2,
        "total-variation": (p - q).abs(),
        "alpha(0.3)": q * ((p / q - 1) - ((p / q) ** 0.3 - 1) / 0.3) / 0.7,
    }
    return found[name] if name in found else 0.3 * found["forward"] + 0.7 * found["reverse"]


NAMES = ["reverse", "forward", "jensen-shannon(0.1)", "hellinger", "chi-square", "total-variation", "alpha(0.3)"]
NAMES += ["0.3 forward + 0.7 reverse"]


def model_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def trainer_of(path, **settings):
    given = {"teacher": WIDE, "kl_coef": 1.0, "kl_estimator": "exact", "kl_level": "token", "temperature": 0.7}
    given |= {"kl_reduction": "sequence", "model": model_of(tiny.folder()), "reward_funcs": None}
    return tiny.trainer(KLTrainer, KLConfig, path, **given | settings)


def batch_of(trainer, rows=None):
    prompts = [{"prompt": f"w{i % 2 + 3} w{i % 2 + 8}"} for i in range(8)]
    torch.manual_seed(5)
    rows = [{**row, **more} for row, more in zip(prompts, rows or [{}] * 8, strict=True)]
    return trainer._generate_and_score_completions(rows)


def log_probs(model, batch, prompts=None):
    """(B, T, V) of the tokens of the completions, after other prompts than their own if these are given."""
    ids, mask = (batch[f"prompt_{name}"] for name in ("ids", "mask"))
    if prompts is not None:
        ids = torch.tensor([tiny.tokenizer()(text)["input_ids"] for text in prompts])
        mask = torch.ones_like(ids)
    whole = torch.cat([ids, batch["completion_ids"]], 1)
    attention = torch.cat([mask, batch["completion_mask"]], 1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=whole, attention_mask=attention, position_ids=positions, use_cache=False).logits
    keep = batch["completion_ids"].shape[1]
    return (logits[:, -keep - 1 : -1] / 0.7).log_softmax(-1)


def at_tokens(batch, *tables):
    return (table.gather(-1, batch["completion_ids"][..., None])[..., 0] for table in tables)


@pytest.fixture
def in_float64():
    """The norms and TRL's head, which round to float32, so that two passes over other prompts differ."""
    with everything_in_float64():
        yield


def check_coefficient(trainer, batch, coefficient, at):
    """The trainer's gradient is that of coefficients on the tokens' log-probs."""
    loss = (coefficient.detach() * at * batch["completion_mask"]).sum() / len(at)
    found = trainer._compute_loss(trainer.model, batch)
    EXACT.check_vector(gradient(found, trainer), gradient(loss, trainer))


def check_reverse(estimator, trainer, batch, log_p, log_q):
    """The trainer descends the token-level reverse KL between these policies."""
    if estimator == "exact":
        compare(trainer, batch, terms(log_p, log_q, "reverse").sum(-1))
        return
    at, ref = at_tokens(batch, log_p, log_q)
    check_coefficient(trainer, batch, at - ref, at)


def gradient(loss, trainer):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(trainer.model.parameters()))])


def compare(trainer, batch, per_token):
    """The trainer's gradient with that of a sum over live tokens, a mean over completions."""
    expected = (per_token * batch["completion_mask"]).sum() / len(per_token)
    found = trainer._compute_loss(trainer.model, batch)
    EXACT.check(found, expected)
    EXACT.check_vector(gradient(found, trainer), gradient(expected, trainer))


def log_probs_by(batch, teacher, prompts=None):
    with torch.no_grad():
        return log_probs(model_of(teacher), batch, prompts)


def pair(trainer, batch, teacher, prompts=None):
    """Both models' log-probs. The student's are computed once for each test: its norms round to float32."""
    return log_probs(trainer.model, batch), log_probs_by(batch, teacher, prompts)


@pytest.fixture
def ready(tmp_path):
    """A trainer, a batch, and the log-probs of the student and of the wide teacher, which is its own by default."""

    def make(**settings):
        trainer = trainer_of(tmp_path, **settings)
        batch = batch_of(trainer)
        return trainer, batch, *pair(trainer, batch, WIDE)

    return make


@pytest.mark.parametrize("name", NAMES)
def test_the_declared_divergence_is_descended(name, ready):
    trainer, batch, log_p, log_q = ready(kl_divergence=name)
    compare(trainer, batch, terms(log_p, log_q, name).sum(-1))


@pytest.mark.parametrize("name", ["reverse", "forward", "jensen-shannon(0.1)"])
@pytest.mark.parametrize("of", ["teacher", "student"])
@pytest.mark.parametrize("tail", ["lump", "none"])
def test_some_of_the_entries(name, of, tail, ready):
    trainer, batch, log_p, log_q = ready(kl_divergence=name, kl_top_k=4, kl_top_k_of=of, kl_tail=tail)
    ids = (log_q if of == "teacher" else log_p.detach()).topk(4, -1).indices
    inside = [x.gather(-1, ids) for x in (log_p, log_q)]
    if tail == "lump":
        inside = [torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in inside]
    compare(trainer, batch, terms(*inside, name).sum(-1))


@pytest.mark.parametrize("of", ["teacher", "student"])
def test_the_tail_by_the_sampled_token(of, ready):
    """Its mean over tokens is in tests/kernels/test_topk.py; here each token has what its formula says."""
    trainer, batch, log_p, log_q = ready(kl_divergence="hellinger", kl_top_k=4, kl_top_k_of=of)
    ids = (log_q if of == "teacher" else log_p.detach()).topk(4, -1).indices
    head = terms(log_p.gather(-1, ids), log_q.gather(-1, ids), "hellinger").sum(-1)
    at, ref = at_tokens(batch, log_p, log_q)
    outside = ~(ids == batch["completion_ids"][..., None]).any(-1)
    root = ((ref - at) / 2).detach().exp()
    tail = 2 * (1 - root) ** 2 + 2 * (1 - root) * (at - at.detach())  # f(u)/u in value, f'(u) on the score
    compare(trainer, batch, head + outside * tail)


@pytest.mark.parametrize("name", ["reverse", "hellinger"])
@pytest.mark.parametrize("weights", [None, [0.9, 0.2]])
def test_several_teachers_by_weight(name, weights, ready):
    both = {"teacher": f"{WIDE},{DEEP}", "teacher_weights": weights}
    trainer, batch, log_p, wide = ready(kl_divergence=name, **both)
    parts = [terms(log_p, log_q, name).sum(-1) for log_q in (wide, log_probs_by(batch, DEEP))]
    first, second = weights or [0.5, 0.5]
    compare(trainer, batch, first * parts[0] + second * parts[1])


def test_weights_of_sum_1_are_the_kl_to_the_geometric_mean(ready):
    """So a proximal teacher, between the teacher and the student as it started, is two teachers."""
    both = {"teacher": f"{WIDE},{tiny.folder()}", "teacher_weights": [0.25, 0.75]}
    trainer, batch, log_p, wide = ready(**both)
    mean = (0.25 * wide + 0.75 * log_probs_by(batch, tiny.folder())).log_softmax(-1)
    kl = ((log_p.exp() * (log_p - mean)).sum(-1) * batch["completion_mask"]).sum() / len(log_p)
    found = trainer._compute_loss(trainer.model, batch)
    EXACT.check_vector(gradient(found, trainer), gradient(kl, trainer))


NAMED = {"teacher": f"wide={WIDE},deep={DEEP}", "teacher_column": "expert"}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("estimator", "wide"), [("exact", 4), ("exact", 0), ("k1", 4)])
def test_each_prompt_names_its_teacher(estimator, wide, tmp_path):
    """The first `wide` of 8 rows name the wide one."""
    trainer = trainer_of(tmp_path, kl_estimator=estimator, **NAMED)
    batch = batch_of(trainer, [{"expert": "wide" if i < wide else "deep"} for i in range(8)])
    log_p, log_wide = pair(trainer, batch, WIDE)
    log_q = torch.where((torch.arange(8) < wide)[:, None, None], log_wide, log_probs_by(batch, DEEP))
    check_reverse(estimator, trainer, batch, log_p, log_q)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("estimator", ["exact", "k1"])
def test_the_teacher_sees_another_prompt(estimator, tmp_path):
    """Self-distillation: the teacher is the model as it starts, and knows more."""
    hints = [f"w{i % 2 + 3} w9 w9 w{i % 2 + 8}" for i in range(8)]
    trainer = trainer_of(tmp_path, teacher=tiny.folder(), teacher_prompt="hint", kl_estimator=estimator)
    batch = batch_of(trainer, [{"hint": hint} for hint in hints])
    log_p, log_q = pair(trainer, batch, tiny.folder(), hints)
    assert (log_p - log_q).abs().max() > 0.01
    check_reverse(estimator, trainer, batch, log_p, log_q)


def test_the_exact_kl_as_a_baseline(ready):
    trainer, batch, log_p, log_q = ready(kl_estimator="k1", kl_baseline="token_kl")
    trainer.model.train()  # an evaluation needs no baseline
    trainer.current_gradient_accumulation_steps = 1
    at, ref = at_tokens(batch, log_p, log_q)
    check_coefficient(trainer, batch, at - ref - (log_p.exp() * (log_p - log_q)).sum(-1), at)


def test_weights_that_fall_along_a_completion(ready):
    trainer, batch, log_p, log_q = ready(kl_prefix_weight=2.0)
    (log_ratio,) = at_tokens(batch, (log_p - log_q).detach())
    size = log_ratio.abs() * batch["completion_mask"]
    weights = 1 + 2 * (1 - (size.cumsum(1) - size) / size.sum(1, keepdim=True))
    compare(trainer, batch, weights * terms(log_p, log_q, "reverse").sum(-1))
    with pytest.raises(MeaningError, match=r"kl_estimator='exact', kl_level='token'.*reverse-token-k1 in the loss"):
        KLConfig("runs/mine", kl_prefix_weight=1.0, kl_level="token", bf16=False)


def test_a_run_with_all_of_it(tmp_path):
    more = lambda row, i: {"expert": ("wide", "deep")[i % 2], "hint": f"w1 {row['prompt']}"}
    rows = tiny.prompts().map(more, with_indices=True)
    term = {"kl_divergence": "jensen-shannon", "kl_level": "future", "kl_discount": 0.5}
    trainer = trainer_of(tmp_path, **NAMED, **term, teacher_prompt="hint", learning_rate=3e-3, max_steps=8)
    trainer.train_dataset = rows
    trainer.train()
    losses = tiny.logged(trainer, "loss")
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"teacher_weights": [0.5]}, "2 `teacher_weights` > 0, one for each teacher"),
        ({"teacher_weights": [1.0, 0.5], "teacher_column": "expert"}, "`teacher_weights` or `teacher_column`"),
        ({"kl_estimator": "k1"}, "`kl_estimator`='exact' with several teachers"),
        ({"kl_top_k": 4}, "one teacher with `kl_top_k`"),
        ({"kl_placement": "reward"}, "`kl_placement`='loss' or 'advantage' with several teachers"),
    ],
)
def test_settings_of_teachers_that_contradict_each_other(settings, text):
    given = {"kl_estimator": "exact", "teacher": f"{WIDE},{DEEP}", "bf16": False}
    with pytest.raises(MeaningError, match=text):
        KLConfig("runs/mine", **given | settings)


def test_a_row_without_its_teacher_or_prompt(tmp_path):
    trainer = trainer_of(tmp_path, **NAMED, teacher_prompt="hint")
    with pytest.raises(SettingError, match=r"one of the teachers \(wide, deep\) in the column 'expert'.*'tall'"):
        batch_of(trainer, [{"expert": "tall", "hint": "w1"}] * 8)
    with pytest.raises(SettingError, match="a prompt for the teacher in the column 'hint' of every row"):
        batch_of(trainer, [{"expert": "wide"}] * 8)
