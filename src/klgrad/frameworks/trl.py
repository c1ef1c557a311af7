"""TRL: its own `GRPOTrainer` and `RLOOTrainer`, from sampled completions to the loss.

A real trainer is built around a tiny model and a tokenizer made on the spot. Two of its methods are given what an
exact problem knows: `_generate_single_turn` returns the completions of the group under audit, and
`_get_per_token_logps_and_entropies` their log-probs, by who asks: the reference model gets `ref_logp`, the scoring
pass before the loss `behavior_logp` (the policy that sampled), the loss itself `logp`. Rewards, the KL in the
reward, baselines, normalisation, clipping and reduction are TRL's. The reward function gives 0, or the completion's
advantage where the audit asks for random ones.
"""
# pyright: reportPrivateImportUsage=false
# (its package exports lazily, which no checker sees)

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch

WORDS = ("<pad>", "<end>", "q", "a", "b", "c")
PROMPT = "q"
BETA = 1.0


def subjects() -> list[Subject]:
    """GRPO: reductions x ratio level x bias correction. RLOO: with and without normalised advantages."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    grpo = [
        _grpo(loss_type, level, correction)
        for loss_type, level, correction in product(
            ("dapo", "grpo", "dr_grpo", "luspo"), ("token", "sequence"), (True, False)
        )
    ]
    return [*grpo, *(_rloo(normalize) for normalize in (False, True))]


def _grpo(loss_type: str, level: str, correction: bool) -> Subject:
    name = f"trl grpo loss_type={loss_type} importance_sampling_level={level} use_bias_correction_kl={correction}"

    def loss(batch: Batch) -> Tensor:
        trainer = _trainer("grpo", batch.group_size)
        trainer.loss_type, trainer.importance_sampling_level = loss_type, level
        trainer.args.use_bias_correction_kl = correction
        trainer.max_completion_length = batch.logp.shape[1]
        return _end_to_end(trainer, batch)

    # A mean over the batch's tokens ties groups together; every other reduction is a mean over completions.
    return Subject(name, "framework", loss, stacks=loss_type != "dapo")


def _rloo(normalize: bool) -> Subject:
    def loss(batch: Batch) -> Tensor:
        trainer = _trainer("rloo", batch.group_size)
        trainer.normalize_advantages = normalize
        return _end_to_end(trainer, batch)

    # Normalised, the advantages of a batch share one mean and deviation.
    return Subject(f"trl rloo normalize_advantages={normalize}", "framework", loss, stacks=not normalize)


def _end_to_end(trainer: Any, batch: Batch) -> Tensor:
    """Score the batch's groups of completions, then take the loss, by the trainer's own methods."""
    with _fed(trainer, batch):
        rows = [{"prompt": PROMPT} for _ in range(len(batch.logp))]
        with torch.no_grad():
            scored = trainer._generate_and_score_completions(rows)
        trainer._klgrad_phase = "loss"
        return trainer._compute_loss(trainer.model, scored)


@contextmanager
def _fed(trainer: Any, batch: Batch) -> Iterator[None]:
    """Lend the trainer the batch's completions, log-probs and rewards."""
    lengths = batch.mask.sum(-1).tolist()
    completions = [[WORDS.index("a")] * (n - 1) + [WORDS.index("<end>")] for n in lengths]

    def generate(*_: Any, **__: Any) -> Any:
        return (completions, None) if hasattr(trainer, "loss_type") else completions  # GRPO also wants log-probs

    def logps(
        model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        if model is trainer.ref_model:
            chosen = batch.ref_logp
        else:
            chosen = batch.logp if trainer._klgrad_phase == "loss" else batch.behavior_logp
        chosen = chosen[:, :logits_to_keep]  # TRL pads to the longest completion of the group
        return chosen, torch.zeros_like(chosen), None

    trainer._klgrad_phase, trainer._klgrad_rewards = "score", batch.advantages[:, 0].tolist()
    trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies = generate, logps
    try:
        yield
    finally:
        del trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies


@cache
def _trainer(kind: str, group_size: int) -> Any:
    """A real trainer of the given group size; every audited setting shares it."""
    import trl

    trainer_class, config_class = {
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    }[kind]
    folder = _saved_model()
    config = config_class(
        output_dir=str(folder / kind),
        per_device_train_batch_size=group_size,
        num_generations=group_size,
        num_iterations=2,  # so that the log-probs at sampling are kept, and stale samples are seen to be stale
        beta=BETA,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    holder: list[Any] = []
    rewards: Callable[..., list[float]] = lambda completions, **_: holder[0]._klgrad_rewards
    trainer = trainer_class(
        model=str(folder),
        reward_funcs=rewards,
        args=config,
        train_dataset=_prompts(group_size),
        processing_class=_tokenizer(),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # which the training loop would set
    holder.append(trainer)
    return trainer


def _prompts(rows: int) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [PROMPT] * rows})


@cache
def _saved_model() -> Path:
    """A model too small to matter, on disk, where TRL looks for the reference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(tempfile.mkdtemp(prefix="klgrad-trl-"))
    tiny = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(tiny).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="c"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
