"""What frameworks of JAX and MLX do by default, summed over every completion through their own functions."""

import re
from dataclasses import replace
from importlib.metadata import files

import pytest
import torch
from oracle import SEQUENCES
from tolerances import SINGLE

from klgrad.audit.probes import from_problem
from klgrad.audit.subject import expected_gradient
from klgrad.frameworks import FRAMEWORKS

pytest.importorskip("jax")
mx, nn = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.nn")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def subject_of(name):
    (found,) = [s for s in FRAMEWORKS[name.split()[0]].subjects() if s.name == name]
    return found


def gradient_of(name, problem):
    none = torch.zeros(len(problem.space), dtype=torch.float64)
    return expected_gradient(subject_of(name), problem, 1, none).mean[: problem.logits.numel()]


def slope(problem, value_of):
    """The gradient of a function of the log-probs (N, T) of every completion."""
    logits = problem.logits.clone().requires_grad_()
    moved = problem.with_logits(logits)
    return torch.autograd.grad(value_of(moved), logits)[0].flatten()


def completion_logp(problem):
    return torch.where(problem.space.mask, problem.logp, 0).sum(-1)


PER_COMPLETION = (
    "tunix grpo kl_loss_mode=kl loss_agg_mode=sequence-mean-token-mean",
    "tunix agentic_grpo kl_loss_mode=kl loss_agg_mode=sequence-mean-token-mean",
    "maxtext rl.grpo_beta rl.loss_agg_mode=sequence-mean-token-mean",
)


@pytest.mark.parametrize("name", PER_COMPLETION)
def test_the_default_kl_of_tunix_ignores_the_reference_and_lowers_the_mean_of_one_over_the_length(name):
    problem = SEQUENCES["varying"].on_policy()
    found = gradient_of(name, problem)
    lengths = problem.space.mask.sum(-1)
    SINGLE.check_vector(found, slope(problem, lambda moved: (completion_logp(moved).exp() / lengths).sum()))
    assert found.norm() > 0.01
    assert torch.equal(gradient_of(name, replace(problem, ref_logits=problem.logits)), found)


def test_maxtext_leaves_tunix_its_default_mode():
    (trainer,) = [file for file in files("maxtext") or () if str(file).endswith("post_train/rl/train_rl.py")]
    source = trainer.read_text()
    assert len(re.findall(r"GrpoConfig\(\s", source)) == 2
    assert "beta=trainer_config.rl.grpo_beta" in source
    assert "kl_loss_mode" not in source


def test_ppo_of_tunix_drops_the_fraction_of_a_score():
    """The rewards begin as zeros of the type of the token ids."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    from klgrad.frameworks import tunix

    problem = SEQUENCES["varying"]
    batch = from_problem(problem, torch.arange(4)[None], torch.zeros(len(problem.space), dtype=torch.float64))
    config = tunix.modules()["ppo_learner"].PPOConfig(beta=0.0)
    arrays = {name: jnp.asarray(x.detach().numpy()) for name, x in vars(batch).items()}
    advantages = []
    for score in (0.0, 0.7, 1.0, 1.9):
        learner = tunix._ppo_learner(config, arrays)
        learner._compute_rewards = lambda score=score, **_: jnp.array([score, 0.0, 0.0, 0.0])
        example = learner._generate_and_compute_advantage({"prompts": [""] * 4}, mode=None)
        advantages.append(torch.from_dlpack(example.advantages))
    assert torch.equal(advantages[0], advantages[1])
    assert torch.equal(advantages[2], advantages[3])
    assert not torch.equal(advantages[1], advantages[2])


@pytest.mark.parametrize("reference", [True, False])
def test_reinforce_of_mlx_lm_lora_adds_an_entropy_bonus(reference):
    """KL(π, ref) - H(π) of whole completions, each divided by the tokens of the batch; without ref, -H(π) alone."""
    problem = SEQUENCES["fixed"].on_policy()

    def objective(moved):
        logp = completion_logp(moved)
        away = logp - torch.where(problem.space.mask, problem.ref_logp, 0).sum(-1)
        return (logp.exp() * (away * reference + logp)).sum() / problem.space.mask.shape[1]

    name = "mlx-lm-lora rlhf_reinforce" + " without a reference model" * (not reference)
    SINGLE.check_vector(gradient_of(name, problem), slope(problem, objective))


class Chain(nn.Module):
    """A language model of four tokens, which looks at the last one."""

    def __init__(self):
        super().__init__()
        self.table = mx.arange(16.0).reshape(4, 4) / 16

    def __call__(self, tokens):
        return self.table[tokens]


def slope_with(beta):
    """Of the loss that generates by itself, by the weights of a model."""
    from klgrad.frameworks.functions import file_of

    file_of.cache_clear()  # an audit replaces what it generates
    losses = file_of("mlx-tune", "mlx_tune.losses")
    mx.random.seed(0)
    model = Chain()
    tokenizer = type("Tokenizer", (), {"decode": staticmethod(str), "eos_token_id": 3})
    scores = iter((1.0, 0.0, 0.5, 0.25))

    def loss(model):
        arguments = (model, tokenizer, mx.array([0]), lambda *_: next(scores), "")
        return losses.grpo_loss(*arguments, num_generations=4, max_tokens=3, beta=beta)[0]

    return nn.value_and_grad(model, loss)(model)[1]["table"]


def test_grpo_of_mlx_tune_is_the_same_for_every_beta():
    gradients = [slope_with(beta) for beta in (0.0, 0.04, 1e6)]
    assert mx.array_equal(gradients[0], gradients[1])
    assert mx.array_equal(gradients[0], gradients[2])
    assert mx.abs(gradients[0]).max() > 0.01
