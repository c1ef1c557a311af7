"""Tunix and MaxText, whose RL is Tunix's GRPO.

`grpo_loss_fn`, also of the agentic learner, and `ppo_policy_loss_fn` receive a batch with the mask, the log-probs of
ref and those before the update, and β = 1; logp and the logits stand for the model. The advantages of PPO are made by
`PPOLearner._generate_and_compute_advantage` with a cluster that has these completions, scores of 0, and a critic that
is 0. Only these files are loaded. The functions cast to float32.
"""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import RunFileError
from .formulae import OVER_COMPLETIONS, OVER_TOKENS, SUM as SUMMED, AsLoss, InReward, number_or_none, part_of
from .framework import Framework
from .harness import bare, load, of_arrays, subject
from .run_settings import EARLIER, SEVERAL, Change, KLPart, Reader, Run, Why, under

if TYPE_CHECKING:
    from ..audit import Subject

PER_COMPLETION, PER_TOKEN, SUM = "sequence-mean-token-mean", "token-mean", "seq-mean-token-sum"


def subjects() -> list[Subject]:
    """GRPO with each estimator, the default first, and with other reductions; the agentic default; PPO."""
    return [
        *(in_loss("grpo", mode, PER_COMPLETION) for mode in ("kl", "mse_kl", "low_var_kl")),
        *(in_loss("grpo", *settings) for settings in (("kl", PER_TOKEN), ("mse_kl", PER_TOKEN), ("mse_kl", SUM))),
        in_loss("agentic_grpo", "kl", PER_COMPLETION),
        *(in_reward(method, 0.95) for method in ("low_var_kl", "kl", "mse_kl")),
        in_reward("kl", 1.0),
    ]


def in_loss(learner: str, mode: str, reduction: str) -> Subject:
    """The KL of `grpo_loss_fn` with the configuration of a learner."""
    config = modules()[f"{learner}_learner"].GRPOConfig(beta=1.0, kl_loss_mode=mode, loss_agg_mode=reduction)
    return of_grpo(f"tunix {learner} kl_loss_mode={mode} loss_agg_mode={reduction}", config)


def of_grpo(name: str, config: Any) -> Subject:
    """Tunix's GRPO with a configuration, as a loss of a framework."""
    config.temperature = 1.0
    grpo = modules()["algo_core"].grpo_loss_fn

    def loss(x: dict[str, Any]) -> Any:
        example = _example(x, x["advantages"][:, 0])
        return grpo((x["logp"], x["logits"]), example, config, pad_id=0, eos_id=1)[0]

    # A mean over the tokens of the batch couples its groups.
    return subject(name, of_arrays(loss, "jax"))


def _example(x: dict[str, object], advantages: object) -> SimpleNamespace:
    """Tunix's `TrainExample`."""
    return SimpleNamespace(
        prompt_ids=x["tokens"],
        completion_ids=x["tokens"],
        completion_mask=x["mask"],
        advantages=advantages,
        ref_per_token_logps=x["ref_logp"],
        old_per_token_logps=x["old_logp"],
    )


def in_reward(method: str, gae_lambda: float) -> Subject:
    """The KL in the rewards of PPO, with a critic that is 0."""
    config = modules()["ppo_learner"].PPOConfig(beta=1.0, kl_method=method, gae_lambda=gae_lambda)
    ppo = modules()["algo_core"].ppo_policy_loss_fn

    def loss(x: dict[str, Any]) -> Any:
        learner = _ppo_learner(config, x)
        example = learner._generate_and_compute_advantage({"prompts": [""] * len(x["mask"])}, mode=None)
        return ppo((x["logp"], x["logits"]), example, config, pad_id=0, eos_id=1)[0]

    name = f"tunix ppo kl_method={method} gae_lambda={gae_lambda:g}"
    # GAE ends with a division by the standard deviation of the batch.
    return subject(name, of_arrays(loss, "jax"), k1="" if method == "kl" else "kl_method=kl")


def _ppo_learner(config: Any, x: dict[str, Any]) -> Any:
    """A learner whose cluster has these completions."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    rows, width = x["mask"].shape
    cluster = SimpleNamespace(
        cluster_config=SimpleNamespace(rollout_config=SimpleNamespace(max_tokens_to_generate=width)),
        rollout=SimpleNamespace(pad_id=lambda: 0, eos_id=lambda: 1),
        generate=lambda **_: SimpleNamespace(
            tokens=x["mask"].astype(int), left_padded_prompt_tokens=[[1]] * rows, text=[""] * rows
        ),
        get_ref_per_token_logps=lambda **_: x["ref_logp"],
        get_old_per_token_logps=lambda **_: x["old_logp"],
        get_values=lambda **_: jnp.zeros((rows, width + 1)),
        buffer_metrics=lambda *_, **__: None,
    )
    return bare(
        modules()["ppo_learner"].PPOLearner,
        rl_cluster=cluster,
        algo_config=config,
        metric_fns=(),
        _rollout_micro_batch_size=rows,
        _compute_logps_micro_batch_size=rows,
        _use_reward_model=False,
        _compute_rewards=lambda **_: jnp.zeros(rows, int),
    )


@cache
def modules() -> dict[str, ModuleType]:
    """The files by name. Log-probs and logits stand for the model."""
    names = (
        *("sft.utils", "rl.function_registry", "rl.algorithm_config", "rl.common", "rl.algo_core"),
        *("rl.agentic.agentic_rl_learner", "rl.grpo.grpo_learner", "rl.agentic.agentic_grpo_learner"),
        "rl.ppo.ppo_learner",
    )
    files = (f"tunix.{name}" for name in names)
    modules: dict[str, Any] = load("google-tunix", *files, stand_ins=("humanize",), replaced=("tunix",))
    modules["algo_core"].nnx = SimpleNamespace(split=lambda model: (None, model))
    modules["common"].compute_per_token_logps = lambda _, model, **__: model
    _make_traceable(modules["ppo_learner"])
    return modules


def _make_traceable(learner: Any) -> None:
    """Let JAX compile the learner, which takes numbers out of its arrays for its metrics."""
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    learner.utils = SimpleNamespace(pad_to_length=lambda ids, **_: ids)  # the completions have one length
    learner.np = SimpleNamespace(**vars(jnp), ma=SimpleNamespace(masked_array=lambda x, mask: x))
    learner.jax = SimpleNamespace(**vars(jax) | {"device_get": lambda x: x})


# `grpo_config`, `agentic_grpo_config` and `ppo_config`.

GRPO: dict[str, object] = {
    "beta": 0.04,
    "kl_loss_mode": "kl",
    "loss_agg_mode": PER_COMPLETION,
    "num_iterations": 1,
    "off_policy_steps": 0,
}
PPO = {"beta": 0.04, "kl_method": "low_var_kl", "gamma": 1.0, "gae_lambda": 0.95, "num_iterations": 1}
SECTIONS = {"grpo_config.": GRPO, "agentic_grpo_config.": GRPO, "ppo_config.": PPO}
KNOWN = {name: value for section, known in SECTIONS.items() for name, value in under(section, **known).items()}
"""The defaults of the classes, and not those of `base_config.yaml`, whose β is 0.08."""

CLAMPS = tuple(f"{section}kl_clamp_value" for section in SECTIONS)
KINDS = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
REDUCTIONS = {
    PER_TOKEN: OVER_TOKENS,
    PER_COMPLETION: OVER_COMPLETIONS,
    "sequence-mean-token-scale": SUMMED,
    SUM: SUMMED,
    "sequence-mean-token-sum-norm": SUMMED,
}
BETA = (
    "A script that starts from base_config.yaml has its β of 0.08 where it names none; the number here is the class's."
)


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the section of the algorithm; its class has the defaults."""
    named = [section for section in SECTIONS if any(name.startswith(section) for name in given)]
    if len(named) != 1:
        received = " and ".join(named) or "none of them"
        raise RunFileError(f"one of {', '.join(SECTIONS)}", received, "give the file of one algorithm")
    (section,) = named
    run = Run("tunix", given, under(section, **SECTIONS[section]), section)
    run.notes += [BETA] * (f"{section}beta" not in given)
    clamp = number_or_none(given, f"{section}kl_clamp_value", None)
    is_ppo = section == "ppo_config."
    run.parts.append((_ppo_part if is_ppo else grpo_part)(run, section, clamp))
    add_stale(run)
    return run.of(section.removesuffix("."), "reverse-kl-sequence" if is_ppo else "reverse-kl-token")


def grpo_part(run: Run, section: str, clamp: float | None) -> KLPart:
    """The KL of its GRPO, and what to change; `clamp` is the bound on the value, None without."""
    mode, unit = run.one_of("kl_loss_mode", KINDS), run.one_of("loss_agg_mode", REDUCTIONS)
    run.switch_on("beta", 0.04, "at 0 there is no KL")
    run.change("kl_loss_mode", "mse_kl", Why.AS_LOSS["k1"] if mode == "kl" else Why.K3)
    if clamp is not None:
        why = f"beyond a value of {clamp:g} there is no gradient"
        run.changes.append(Change(f"{section}kl_clamp_value", None, clamp, why))
    if REDUCTIONS[unit] == OVER_COMPLETIONS:
        run.change("loss_agg_mode", "token-mean", Why.LENGTH)
    name = f"grpo kl_loss_mode={mode} loss_agg_mode={unit}{'' if clamp is None else f' kl_clamp_value={clamp:g}'}"
    return part_of("tunix", name, AsLoss(KINDS[mode], clamp=clamp), REDUCTIONS[unit], run["beta"])


def _ppo_part(run: Run, section: str, clamp: float | None) -> KLPart:
    mode = run.one_of("kl_method", KINDS)
    run.change("kl_method", "kl", Why.ONLY_K1)
    for name in ("gamma", "gae_lambda"):
        run.change(name, 1.0, "the KL of later tokens is discounted")
    if clamp is not None:
        run.changes.append(Change(f"{section}kl_clamp_value", None, clamp, f"values beyond {clamp:g} are cut"))
    form = InReward(KINDS[mode], discount=run["gamma"] * run["gae_lambda"], clamp=clamp)
    caveat = "Audited with a critic that is 0, and advantages that are not normalised."
    name = f"ppo kl_method={mode} gamma={run['gamma']:g} gae_lambda={run['gae_lambda']:g}"
    return part_of("tunix", name, form, OVER_TOKENS, run["beta"], caveat)


def add_stale(run: Run) -> None:
    """Say why completions are not those of the policy that is updated."""
    run.is_stale_by("num_iterations", SEVERAL, least=2)
    if f"{run.sections[-1]}off_policy_steps" in run.settings:  # PPO has none
        run.is_stale_by("off_policy_steps", EARLIER)


FRAMEWORK = Framework.of(
    "tunix",
    subjects,
    reader=Reader(
        "Tunix",
        KNOWN,
        read_config,
        re.compile(r"tunix\.cli\.(grpo|ppo)\w*|tunix\.cli\.\w*(grpo|ppo)\w*"),
        beginnings=tuple(SECTIONS),
        harmless=(
            "rl_training_config.",
            *(f"{section}force_compute_kl" for section in SECTIONS),
            *(f"{section}advantage_estimator" for section in SECTIONS),
        ),
        sections=CLAMPS,
    ),
)

# MaxText: its RL, its experimental GRPO, and its distillation.
#
# `train_rl.py` passes these settings to Tunix's `GRPOConfig`, and no `kl_loss_mode`. The experimental
# `grpo_loss_fn_nnx` receives β = 1 and rewards of 0; logp and ref_logp stand for the two models.
# `CombinedDistillationStrategy.compute_loss` receives the logits of the student and the teacher, and the sampled tokens
# as labels; offline the teacher has its most likely entries. Only these files are loaded.

STAND_INS = ("pathwaysutils", "transformers", "tensorflow", "orbax", "jetstream", "grain")
TOP_K = 20


def subjects_of_maxtext() -> list[Subject]:
    """RL, the default first; the experimental GRPO; distillation online with and without labels, and offline."""
    return [
        *map(_rl, (PER_COMPLETION, PER_TOKEN)),
        _experimental(),
        *(_distillation(*settings) for settings in ((0.5, False), (1.0, False), (1.0, True))),
    ]


def _rl(reduction: str) -> Subject:
    config = modules()["grpo_learner"].GRPOConfig(
        num_generations=2, num_iterations=1, beta=1.0, epsilon=0.2, loss_algo="grpo", loss_agg_mode=reduction
    )
    return of_grpo(f"maxtext rl.grpo_beta rl.loss_agg_mode={reduction}", config)


def _experimental() -> Subject:
    config = SimpleNamespace(
        train_data_columns="prompt", num_generations=1, grpo_epsilon=0.2, grpo_beta=1.0, num_experts=1
    )

    def loss(x: dict[str, Any]) -> Any:
        import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

        live = jnp.pad(x["mask"].astype(int), ((0, 0), (1, 0)))  # with a prompt of one token, which it leaves out
        names = ("completions", "completions_position", "completions_segmentation")
        data = {f"prompt_{name}": x["tokens"] for name in names}
        data |= {"ar_completions_segmentation": live, "completions_logprobs": x["old_logp"]}
        return _trainer().grpo_loss_fn_nnx(x["logp"], config, data, None, None, x["ref_logp"])[0]

    return subject("maxtext experimental.rl grpo_beta", of_arrays(loss, "jax"))


def _distillation(alpha: float, offline: bool) -> Subject:
    from ..audit.subject import VOCABULARY

    name = "maxtext.trainers.post_train.distillation.distillation_utils"
    replaced = ("maxtext", "tunix", "orbax")
    file = load("maxtext", name, stand_ins=STAND_INS, replaced=replaced)["distillation_utils"]
    strategy = file.CombinedDistillationStrategy(None, None, temperature=1.0, alpha=alpha)
    output = file.DistillationForwardOutput

    def loss(x: dict[str, Any]) -> Any:
        import jax  # pyright: ignore[reportMissingImports]

        teacher = output(x["ref_logits"])
        if offline:
            logits, indices = jax.lax.top_k(x["ref_logits"], TOP_K)
            teacher = output(logits, top_k_indices=indices)
        labels = jax.nn.one_hot(x["tokens"], x["logits"].shape[-1]) * x["mask"][..., None]
        return strategy.compute_loss(output(x["logits"]), teacher, labels)[0]

    name = f"maxtext distill_alpha={alpha:g}{f' offline, top {TOP_K}' * offline}"
    return subject(name, of_arrays(loss, "jax"), entries=VOCABULARY * offline)


@cache
def _trainer() -> ModuleType:
    stub: Any = ModuleType("gcloud_stub")
    stub.vertex_tensorboard_modules = lambda: (None, None)
    loaded = {"maxtext.common.gcloud_stub": stub}
    name = "maxtext.experimental.rl.grpo_trainer"
    module = load("maxtext", name, stand_ins=STAND_INS, replaced=("maxtext",), loaded=loaded)["grpo_trainer"]
    models_and_rewards = SimpleNamespace(
        compute_log_probs_nnx=lambda logp, *_, **__: (logp, None), dummy_reward_len=lambda mask: 0.0 * mask.sum(-1)
    )
    vars(module).update(EPS=1e-8, grpo_utils=models_and_rewards)
    return module


RL = "rl."
MAXTEXT_KNOWN = under(RL, grpo_beta=0.08, loss_agg_mode=PER_COMPLETION, num_iterations=1, off_policy_steps=0)
NO_MODE = (
    "MaxText has no setting for Tunix's kl_loss_mode, whose default is k1: no setting makes this KL act. Pass "
    'kl_loss_mode="mse_kl" to GrpoConfig in train_rl.py.'
)


def read_config_of_maxtext(given: dict[str, Any], _: str | None = None) -> Run:
    """Read `rl` of a configuration of MaxText's RL trainer."""
    run = Run("maxtext", given, MAXTEXT_KNOWN, RL)
    unit = run.one_of("loss_agg_mode", REDUCTIONS)
    run.change("grpo_beta", 0.0, "k1 as a loss descends nothing; or patch the trainer")
    name = f"rl.grpo_beta rl.loss_agg_mode={unit}"
    run.parts = [part_of("maxtext", name, AsLoss("k1"), REDUCTIONS[unit], run["grpo_beta"])]
    run.notes.append(NO_MODE)
    add_stale(run)
    return run.of("Tunix's GRPO", None)


MAXTEXT = Framework.of(
    "maxtext",
    subjects_of_maxtext,
    reader=Reader(
        "MaxText",
        MAXTEXT_KNOWN,
        read_config_of_maxtext,
        re.compile(r"(.*/)?(src\.)?maxtext[./]trainers[./]post_train[./]rl[./]train_rl(\.py)?"),
        beginnings=(f"{RL}grpo_", f"{RL}use_agentic_rollout"),
    ),
)
