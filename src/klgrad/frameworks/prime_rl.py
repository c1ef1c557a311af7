"""prime-rl: its KL formulae; the algorithm of each source of prompts, and `trainer.loss`.

By default it has no reference: a squared log-ratio to the sampler. Distillation has log-ratios as advantages.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .formulae import OVER_TOKENS, framework_of, kl_subject, part_of
from .framework import Default, Source
from .run_settings import KLPart, Reader, Run, RunDraft, one_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch


def losses() -> Iterator[Subject]:
    """The default, and distillation."""
    yield kl_subject("prime-rl", "trainer.loss.type=default kl_tau", _drift, OVER_TOKENS)
    yield kl_subject("prime-rl", "algorithm=opd", _distilled, OVER_TOKENS)


def _drift(batch: Batch) -> Tensor:
    return (batch.logp - batch.behavior_logp).square()


def _distilled(batch: Batch) -> Tensor:
    ratio = (batch.logp - batch.behavior_logp).exp()
    kept = batch.logp.exp() - batch.behavior_logp.exp() >= -0.2
    return kept * (batch.logp - batch.ref_logp).detach() * ratio + 1e-3 * _drift(batch)


# Its configurations.

KNOWN: dict[str, Any] = {
    "orchestrator.algo.type": "grpo",
    "trainer.loss.type": "default",
    "trainer.loss.kl_tau": 0.001,
    "orchestrator.max_off_policy_steps": 8,
}
SOURCES = "orchestrator.train.source"
DISTILLS = ("opd", "opsd")
ALGORITHMS = ("grpo", "echo", "max_rl", "rae", "hierarchical_grpo", *DISTILLS, "sft")
TO_SAMPLER = (
    "kl_tau={:g} is no KL to a reference: a squared log-ratio to the sampler, which is 0 with its gradient on fresh "
    "samples."
)
FIXED = "the loss of opd and opsd has a fixed 0.001 in its place"


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the algorithms of all sources, with prime-rl's defaults for what is missing."""
    draft = RunDraft("prime-rl", given, KNOWN)
    draft.one_of("trainer.loss.type", ("default", "ipo"))
    algorithms = [one_of("orchestrator.algo.type", x, ALGORITHMS) for x in _algorithms(draft.settings, given)]
    draft.parts = [_part(x) for x in sorted({x for x in algorithms if x in DISTILLS})]
    others = sorted({x for x in algorithms if x not in DISTILLS})
    if "trainer.loss.kl_tau" in given and not others:
        draft.unread["trainer.loss.kl_tau"] = FIXED
    draft.notes += [TO_SAMPLER.format(draft["trainer.loss.kl_tau"])] * bool(others)
    draft.notes += [f"Sources with {', '.join(others)} have no KL to a reference."] * bool(others and draft.parts)
    steps = draft["orchestrator.max_off_policy_steps"]
    stale = [f"max_off_policy_steps={steps}: completions of earlier policies are trained on"] * (steps > 0)
    stale.append("prime-rl samples with vLLM, whose log-probs differ from those of the trainer")
    return draft.run(", ".join(dict.fromkeys(algorithms)), stale, "reverse-kl-token")


def _algorithms(settings: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """One for each source, which may have its own."""
    common = settings["orchestrator.algo.type"]
    sources = given.get(SOURCES)
    if not isinstance(sources, list) or not sources:
        return [common]
    own = [source.get("algo") if isinstance(source, dict) else None for source in sources]
    return [str(algo.get("type", common)) if isinstance(algo, dict) else common for algo in own]


def _part(algorithm: str) -> KLPart:
    caveat = "ref is the teacher here" + (", which is the policy with a demonstration." if algorithm == "opsd" else ".")
    return part_of("prime-rl", "algorithm=opd", _distilled, OVER_TOKENS, 1.0, caveat, "advantage")


FRAMEWORK = framework_of(
    "prime-rl",
    losses,
    Source("PrimeIntellect-ai/prime-rl", "0.8.0", ("src/prime_rl/trainer/rl/loss.py",)),
    Default(
        "no reference; a squared log-ratio to the sampler, kl_tau=0.001", "prime-rl trainer.loss.type=default kl_tau"
    ),
    reader=Reader(
        "prime-rl",
        KNOWN,
        read_config,
        re.compile(r"prime_rl\..*"),
        beginnings=("orchestrator.", "trainer.loss."),
        harmless=("trainer.optim.", "orchestrator.advantage."),
        source="PrimeIntellect-ai/prime-rl: src/prime_rl/trainer/rl/loss.py, packages/prime-rl-configs; read on "
        "2026-11-18 at 0.8.1.dev67, whose losses are those of 0.8.0",
    ),
)
