"""Reinforcement learning with a KL term on a task with room: what the experiments that compare placements share.

The task: sums and differences of two numbers of one or two digits (10,000 pairs), "Reply with just the number"; the
reward is 1 for the right number. SmolLM2-135M-Instruct starts near .05. Held out: 512 questions of the same kind, and
768 of three other kinds (the largest of three numbers, word problems, three summands). The matched setting is
`loss_type=dr_grpo` (summed over tokens, divided by a constant) for the policy loss and for every KL term, so that
`kl_coef` has one meaning.
"""

import itertools
import math
from pathlib import Path
from typing import Any

from packed import Job, Row

UPDATES, EVERY, RATE, SEEDS = 60, 20, 1e-5, (0, 1, 2)
"""Updates, how many lie between two evaluations, learning rate and seeds of experiments that have no others."""
COMMON: dict[str, Any] = {
    "max_steps": UPDATES,
    "eval_every": EVERY,
    "task": "mixed-addition,mixed-subtraction",
    "eval_task": "mixed-addition,mixed-subtraction,maximum,mixed-word-problems,mixed-three-summands",
    "digits": 2,
    "train_size": 8192,
    "eval_size": 256,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 256,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "num_iterations": 1,
    "max_completion_length": 24,
    "gradient_checkpointing": "false",
    "loss_type": "dr_grpo",
    "save_strategy": "no",
    "report_to": "none",
}
DIVISOR_EPSILON = 1e-4
"""What TRL adds to a group's standard deviation before it divides by it."""


def job(label: Row, arm: str, model: Path, **settings: Any) -> Job:
    """One run: the shared settings, those in its label, its own, and the flags of its arm. The label is its name."""
    labelled = {key: label[key] for key in ("kl_coef", "learning_rate", "seed")}
    chosen = {**COMMON, "model": model, **labelled, **settings}
    flags = [str(x) for key, value in chosen.items() for x in (f"--{key}", value)]
    name = "_".join(f"{value:g}" if isinstance(value, float) else str(value) for value in label.values())
    return Job(name, {"job": name, **label}, [*flags, *arm.split()])


def train(job: Job, folder: Path) -> list[Row]:
    """Train one policy; a row for each evaluation, with what the updates since the last one had in common."""
    import fused_layers
    import graph_sampling
    import shared_prompts
    from judge import Judge

    from klgrad.training.build import build, models_of
    from klgrad.training.settings import parse

    settings = parse("train", [*job.flags, "--output_dir", str(folder)])
    trainer, evaluator = build(settings, models_of(settings))
    fused_layers.install(trainer)
    graph_sampling.install(trainer)
    shared_prompts.install(trainer)
    judge, watch = Judge(trainer, evaluator, on_reference=False), EffectiveCoefficient(trainer)
    every, rows = settings.run.eval_every, []
    broken = BrokenUpdates(trainer)

    def evaluate() -> None:
        step = trainer.state.global_step
        if step % every == 0 and (not rows or rows[-1]["update"] != step):
            found = {"skipped_updates": broken.skipped, **watch.since_last(), **judge(seed=1000 + step)}
            rows.append({"update": step, **found})

    evaluate()
    trainer.after_update = [evaluate]
    try:
        trainer.train()
    except Broken as problem:
        rows.append({"update": trainer.state.global_step, **watch.since_last(), "problem": str(problem)})
    return [{"problem": "", **row} for row in rows]


class Broken(RuntimeError):
    """The policy has weights or logits that are not finite, from which nothing can be sampled."""


class BrokenUpdates:
    """Skips updates whose gradient is not finite, and stops a run whose policy is not.

    One update with a gradient of NaN makes all weights NaN. Sampling from those is an assertion on the device, which
    stops every job that shares it by MPS. Some runs of `std.csv` and `comedy.csv` had such updates from cuDNN's
    attention (`klgrad.trl.contract`), while the loss was ordinary.
    """

    def __init__(self, trainer: Any) -> None:
        import torch

        self.skipped = 0
        clip, generate = trainer.accelerator.clip_grad_norm_, trainer._generate_single_turn

        def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = list(parameters)
            norm = clip(parameters, *args, **kwargs)
            if norm is not None and not torch.isfinite(torch.as_tensor(norm)):
                self.skipped += 1
                for parameter in parameters:
                    parameter.grad = None  # the optimizer leaves a parameter without a gradient as it is
            return norm

        def checked(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            bad = [n for n, p in trainer.model.named_parameters() if not torch.isfinite(p).all()]
            if bad:
                raise Broken(f"{len(bad)} weights are not finite, such as {bad[0]}")
            return generate(prompt_ids, *args, **kwargs)

        trainer.accelerator.clip_grad_norm_, trainer._generate_single_turn = clipped, checked


class EffectiveCoefficient:
    """What dividing by a group's standard deviation makes of the KL's coefficient.

    A group with reward deviation s gets its reward's gradient times λ and its KL's gradient times κ. Without division
    both are 1. With it λ = 1/s, and κ = 1 for a KL outside the reward; for a KL inside the reward λ = κ = 1/s̃, where s̃
    is the deviation of reward - β KL. The effective coefficient is β mean(κ) / mean(λ), where λ is weighted by s², the
    size of the reward's gradient. It leaves out that a reward minus the mean of its group has 1 - 1/n of its gradient.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.updates = trainer, []
        calculate = trainer._calculate_rewards

        def watched(*args: Any) -> Any:
            rewards = calculate(*args)
            if trainer.model.training:
                self.updates.append(self._update(rewards.double()))
            return rewards

        trainer._calculate_rewards = watched

    def _update(self, rewards: Any) -> dict[str, float]:
        args = self.trainer.args
        grouped = rewards.view(-1, args.num_generations, rewards.shape[1])
        inside, coef = grouped.shape[2] > 1, self.trainer.coefficient.value
        reward = grouped[..., 0]
        plain = reward.std(1)
        mixed = (reward - coef * grouped[..., 1]).std(1) if inside else plain
        divided = args.scale_rewards != "none"
        of_reward = 1 / (mixed + DIVISOR_EPSILON) if divided else mixed.new_ones(len(mixed))
        of_kl = of_reward if inside else mixed.new_ones(len(mixed))
        informative = plain.square().sum()
        weight = (plain.square() * of_reward).sum() / informative if informative > 0 else of_reward.mean()
        return {
            "reward": float(reward.mean()),
            "groups_without_spread": float((plain == 0).double().mean()),
            "effective_kl_coef": float(coef * of_kl.mean() / weight),
            "largest_kl_weight": float(coef * of_kl.max()),
        }

    def since_last(self) -> dict[str, float | None]:
        """Means over the updates since the last call, and the noise of the rewards."""
        names = ("reward", "groups_without_spread", "effective_kl_coef", "largest_kl_weight")
        found, self.updates = self.updates, []
        means = {f"train_{n}": sum(u[n] for u in found) / len(found) if found else None for n in names}
        return {**means, "train_reward_noise": _noise([update["reward"] for update in found])}


def _noise(values: list[float]) -> float | None:
    """The standard deviation of a series without its trend, from differences of neighbours."""
    steps = [after - before for before, after in itertools.pairwise(values)]
    return math.sqrt(sum(step * step for step in steps) / (2 * len(steps))) if steps else None
