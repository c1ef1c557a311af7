"""The examples for other trainers: the declared KL, by the trainers' own files where these are installed.

prime-rl and NeMo-RL are not: their side is replaced by what the example takes from it, on tensors of the same layout.
"""

import importlib.util
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tolerances import EXACT

from klgrad import ImportanceWeighting, KLTerm, Rollout
from klgrad.audit import audit
from klgrad.audit.probes import Batch, from_problem
from klgrad.audit.subject import Subject
from klgrad.enumeration import autoregressive
from klgrad.frameworks import FRAMEWORKS, functions, ms_swift as swift, openrlhf as openrlhf_audit, skyrl as skyrl_audit
from klgrad.frameworks.harness import bare, load, standing_in

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
UNBOUNDED = KLTerm(weighting=ImportanceWeighting("prefix", None))
"""The examples' bound adds bias; without it the audit finds the target off-policy too."""

WHOLE = ("reverse-kl-sequence", "reverse-kl-sequence")


def needs(name):
    return pytest.mark.skipif(FRAMEWORKS[name].installed is None, reason=f"{name} is not installed")


def loaded(monkeypatch, folder, modules) -> Any:
    """`declared_kl.py` of a folder, which imports from the given modules; their parents are made where they lack."""
    for name, module in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, parent, modules.get(parent) or ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            setattr(sys.modules[name.rpartition(".")[0]], parts[-1], module)
    spec = importlib.util.spec_from_file_location(f"declared_kl_{folder}", EXAMPLES / folder / "declared_kl.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    return example


def modules_of(package, given):
    """Modules with these names in them, by the names that they have below a package."""
    made = {f"{package}.{name}": ModuleType(f"{package}.{name}") for name in given}
    for name, content in given.items():
        vars(made[f"{package}.{name}"]).update(content)
    return made


RAY = {"ray": SimpleNamespace(remote=lambda **_: lambda kind: kind)}


def verdicts(name, loss):
    found = audit(Subject(f"{name} klgrad", "framework", loss, framework=name))
    return found.verdict, found.verdict_off_policy


# ms-swift


@pytest.fixture
def ms_swift(monkeypatch):
    forward = {"_get_per_token_logps_and_entropies": lambda self, *_, **__: (self.given, None)}
    own = type("GRPOTrainer", (swift._modules()["grpo_trainer"].GRPOTrainer,), forward)
    factory = SimpleNamespace(TRAINER_MAPPING={"grpo": "swift.rlhf_trainers.GRPOTrainer"})
    given = {"rlhf_trainers": {"GRPOTrainer": own}, "trainers.trainer_factory": {"TrainerFactory": factory}}
    example = loaded(monkeypatch, "ms_swift", modules_of("swift", given))
    monkeypatch.setattr(example, "OFF_POLICY", UNBOUNDED)
    return example, factory


def swift_loss(example, batch: Batch, loss_type="grpo"):
    trainer = bare(
        example.DeclaredKLTrainer, **vars(swift._trainer(loss_type)), max_completion_length=1, given=batch.logp
    )
    data = SimpleNamespace(
        completion_mask=batch.mask,
        truncated_mask=torch.zeros(len(batch.mask), dtype=torch.bool),
        ref_per_token_logps=batch.ref_logp,
        old_per_token_logps=batch.old_logp,
        rollout_per_token_logps=None,
        teacher_per_token_logps=None,
        advantages=batch.advantages,
        num_items_in_batch=batch.mask.sum(),
    )
    loss, metrics = trainer._compute_loss_and_metrics(None, {}, data)
    assert trainer.beta == 1.0  # restored
    assert torch.isfinite(torch.tensor(metrics["kl"]))
    return loss


@needs("ms-swift")
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_ms_swift(ms_swift, loss_type):
    example, factory = ms_swift
    assert factory.TRAINER_MAPPING["grpo"] == f"{example.__name__}.DeclaredKLTrainer"
    assert verdicts("ms-swift", lambda batch: swift_loss(example, batch, loss_type)) == WHOLE


# OpenRLHF


@pytest.fixture
def openrlhf(monkeypatch):
    names = ("openrlhf.models", "openrlhf.models.utils", "openrlhf.trainer.ppo_utils.experience")
    own = openrlhf_audit.modules()
    shared = {name: getattr(own["loss"], name) for name in ("PolicyLoss", "aggregate_loss")} | {"Actor": None}
    given = modules_of("openrlhf", {"models": shared}) | {names[1]: own["utils"], names[2]: own["experience"]}
    stand_ins = (*(name for name in openrlhf_audit.STAND_INS if name != names[0]), "tqdm")
    actor = load("openrlhf", "openrlhf.trainer.ray.ppo_actor", stand_ins=stand_ins, loaded=given)["ppo_actor"]
    if not hasattr(actor.PolicyModelActor, "__ray_metadata__"):  # Ray is not installed
        actor.PolicyModelActor.__ray_metadata__ = SimpleNamespace(modified_class=actor.PolicyModelActor)
    example = loaded(monkeypatch, "openrlhf", {"openrlhf.trainer.ray.ppo_actor": actor, **RAY})
    monkeypatch.setattr(example, "TERM", UNBOUNDED)
    return example


def openrlhf_loss(example, batch: Batch):
    losses, modules = [], openrlhf_audit.modules()
    kl = SimpleNamespace(use_loss=True, init_coef=1.0, estimator="k3", unbiased_gradient=False)
    trainer = bare(
        example.DeclaredKLTrainer,
        args=SimpleNamespace(
            algo=SimpleNamespace(kl=kl),
            actor=SimpleNamespace(entropy_coef=None, aux_loss_coef=0),
            train=SimpleNamespace(dynamic_batch_enable=False),
        ),
        strategy=SimpleNamespace(
            ring_attn_group=None,
            backward=lambda loss, *_: losses.append(loss),
            optimizer_step=lambda *_, **__: None,
            get_grad_norm=lambda _: 0.0,
        ),
        actor_loss_fn=modules["loss"].PolicyLoss(),
        **dict.fromkeys(("aux_loss", "ema_model", "actor_optim")),
        actor_scheduler=SimpleNamespace(get_last_lr=lambda: [0.0]),
        actor=Forward(batch.logp),
    )
    experience = modules["experience"].Experience(
        sequences=batch.tokens,
        attention_mask=batch.mask,
        action_mask=batch.mask.to(batch.logp.dtype),
        action_log_probs=batch.old_logp,
        base_action_log_probs=batch.ref_logp,
        rollout_log_probs=batch.behavior_logp,
        advantages=batch.advantages,
        info={},
    )
    trainer.training_step(experience, 1.0, 0, {"batch_num_tokens": float(batch.mask.shape[0])})
    return losses[0]


@dataclass
class Forward:
    """The model: its log-probs, and nothing else."""

    logp: torch.Tensor

    def train(self):
        pass

    def __call__(self, *_, **__):
        return self.logp, SimpleNamespace()


@needs("openrlhf")
def test_openrlhf(openrlhf):
    assert verdicts("openrlhf", lambda batch: openrlhf_loss(openrlhf, batch)) == WHOLE


# SkyRL


@pytest.fixture
def skyrl(monkeypatch):
    given = {
        "config": {"SkyRLTrainConfig": None},
        "entrypoints.main_base": {"BasePPOExp": object},
        "trainer": {"RayPPOTrainer": skyrl_audit.modules()["trainer"].RayPPOTrainer},
        "utils": {"validate_cfg": None},
        "utils.utils": {"initialize_ray": None},
    }
    example = loaded(monkeypatch, "skyrl", RAY | modules_of("skyrl.train", given))
    monkeypatch.setattr(example, "OFF_POLICY", UNBOUNDED)
    return bare(example.DeclaredKLTrainer, **vars(skyrl_audit._trainer("k1", "rloo", 1.0, "")))


def skyrl_loss(trainer, batch: Batch):
    """The first update on a batch: the log-probs before it are those of the policy."""
    old_logp = batch.logp.detach()
    data = skyrl_audit._training_batch(batch, old_logp, torch.zeros_like(old_logp))
    data["rollout_logprobs"] = batch.behavior_logp
    with standing_in(("loguru",)):
        data = trainer.compute_advantages_and_returns(trainer.apply_reward_kl_penalty(data))
    data = trainer._normalize_advantages(data, [(0, len(batch.logp))])
    algorithm = trainer.cfg.trainer.algorithm
    policy_loss = skyrl_audit.modules()["ppo_utils"].ppo_policy_loss
    return policy_loss(batch.logp, old_logp, data["advantages"], algorithm, loss_mask=data["loss_mask"])[0]


@needs("skyrl")
def test_skyrl(skyrl):
    assert verdicts("skyrl", lambda batch: skyrl_loss(skyrl, batch)) == WHOLE


@needs("skyrl")
def test_skyrl_refuses_advantages_that_it_would_scale(skyrl):
    skyrl.cfg.trainer.algorithm.advantage_batch_normalize = True
    with pytest.raises(ValueError, match="advantage_batch_normalize=false"):
        skyrl.compute_advantages_and_returns({})


# Trinity-RFT


class Registry(dict):
    """In the place of Trinity's: its package does not import here without vLLM and more."""

    def register_module(self, name):
        return lambda kind: self.setdefault(name, kind)


@pytest.fixture
def trinity(monkeypatch):
    registry = Registry()
    given = {"kl_fn": {"KLFn": functions.trinity_functions().KLFn, "KL_FN": registry}}
    utils = load("trinity-rft", "trinity.algorithm.utils")["utils"]
    given = modules_of("trinity.algorithm", given) | {"trinity.algorithm.utils": utils}
    example = loaded(monkeypatch, "trinity", given)
    monkeypatch.setattr(example, "OFF_POLICY", UNBOUNDED)
    return registry


@needs("trinity")
def test_trinity(trinity):
    kl, reduction = trinity["klgrad"](kl_coef=1.0), "seq-mean-token-sum"
    loss = lambda batch: kl.calculate_kl_loss(batch.logp, batch.ref_logp, batch.mask, reduction, batch.old_logp)[0]
    assert verdicts("trinity", loss) == WHOLE


@needs("trinity")
def test_trinity_refuses_it_as_a_reward(trinity):
    with pytest.raises(NotImplementedError, match="kl_loss_fn"):
        trinity["klgrad"]().calculate_kl(None, None)


# prime-rl and NeMo-RL

PROBLEM = autoregressive(3, 3, ends=True, seed=5, away_from_ref=1.0, off_policy=0.5)
BETA = 0.3


def some_batch():
    return from_problem(PROBLEM, torch.arange(0, len(PROBLEM.space), 3)[None], torch.zeros(len(PROBLEM.space)).double())


def gradient(loss, batch):
    return torch.autograd.grad(loss, batch.logp)[0]


def expected_gradient(term, batch, per):
    """β times the sum over tokens of the term's coefficient and the score, divided by `per`."""
    rollout = Rollout(batch.logp, batch.ref_logp, batch.mask, behavior_logp=batch.behavior_logp)
    return BETA * term(rollout).coefficient / per


@dataclass
class Inputs:
    """As prime-rl's `LossInputs`: 1-D, one completion."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclass
class Outputs:
    """As prime-rl's `LossOutputs`."""

    loss: torch.Tensor
    metrics: dict


@pytest.fixture
def prime_rl(monkeypatch):
    zero = lambda inputs, config: Outputs(0 * inputs.trainer_logprobs.sum(), {"settings": config.settings})
    given = {
        "configs.trainer": {"DefaultLossConfig": lambda **x: SimpleNamespace(settings=x)},
        "trainer.rl.loss": {"LossInputs": Inputs, "LossOutputs": Outputs, "default_loss_fn": zero},
    }
    return loaded(monkeypatch, "prime_rl", modules_of("prime_rl", given))


def test_prime_rl(prime_rl):
    batch = some_batch()
    tensors = zip(batch.logp, batch.behavior_logp, batch.ref_logp, batch.advantages, batch.mask.bool(), strict=True)
    rows = [prime_rl.loss(Inputs(*each), beta=BETA, kl_tau=0.0) for each in tensors]
    assert rows[0].metrics["settings"] == {"kl_tau": 0.0}
    total = torch.stack([row.loss for row in rows]).sum()
    EXACT.check(gradient(total, batch), expected_gradient(prime_rl.TERM, batch, per=1))


def test_prime_rl_without_a_reference(prime_rl):
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="ref_logprobs"):
        prime_rl.loss(Inputs(x, x, None, x, x.bool()), beta=BETA)


class LossType(Enum):
    """As NeMo-RL's."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class ClippedPG:
    """In the place of NeMo-RL's `ClippedPGLossFn`: its policy loss is 0, and its own KL must be off."""

    def __init__(self, cfg):
        self.reference_policy_kl_penalty, self.loss_type = cfg["reference_policy_kl_penalty"], cfg["loss_type"]

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        assert self.reference_policy_kl_penalty == 0
        return 0 * next_token_logprobs.sum(), {"loss": 0.0}


@pytest.fixture
def nemo_rl(monkeypatch):
    given = {"interfaces": {"LossType": LossType}, "loss_functions": {"ClippedPGLossFn": ClippedPG}}
    return loaded(monkeypatch, "nemo_rl", modules_of("nemo_rl.algorithms.loss", given))


@pytest.mark.parametrize("loss_type", LossType)
def test_nemo_rl(nemo_rl, loss_type):
    """Its tensors have one more column, the first token, which has no log-prob; the policy's do not."""
    batch = some_batch()
    shifted = lambda x: torch.cat([torch.full_like(x[:, :1], -9.0), x], 1)
    mask = batch.mask.to(batch.logp.dtype)
    data = {
        "token_mask": torch.cat([0 * mask[:, :1], mask], 1),
        "sample_mask": torch.ones(len(mask)),
        "reference_policy_logprobs": shifted(batch.ref_logp),
        "generation_logprobs": shifted(batch.behavior_logp),
    }
    data["sample_mask"][0] = 0
    sequences, tokens = torch.tensor(7.0), torch.tensor(40.0)
    loss_fn = nemo_rl.DeclaredKLLossFn({"reference_policy_kl_penalty": BETA, "loss_type": loss_type})
    loss, metrics = loss_fn(batch.logp, data, sequences, tokens)
    expected = expected_gradient(nemo_rl.TERM, batch, per=tokens if loss_type is LossType.TOKEN_LEVEL else sequences)
    expected[0] = 0  # the completion that NeMo-RL has masked
    EXACT.check(gradient(loss, batch), expected)
    assert metrics["kl_penalty"] == pytest.approx(float(loss.detach()))
    with pytest.raises(ValueError, match="reference_policy_kl_penalty above 0"):
        nemo_rl.DeclaredKLLossFn({"reference_policy_kl_penalty": 0, "loss_type": loss_type})
