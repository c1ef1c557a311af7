"""Build the trainer and the evaluator from settings; models, prompts and rewards are checked before training."""

from dataclasses import dataclass
from typing import Any

from ..errors import SettingError
from ..models import EMBEDDED, layer_count, resolve
from ..support import Json
from ..trl.config import teachers_of
from ..trl.kl_trainer import check_prompts
from .checkpoint import RunTrainer
from .data import Data, Reward, checked_reward, data_of, has_reward, probe
from .evaluate import Evaluator, TeacherComparison
from .settings import RunSettings

DROPPED = 3
"""The default student lacks one in this many layers of its teacher."""


@dataclass(frozen=True)
class Models:
    """The policy: its name as it is printed, path and keyword arguments for `from_pretrained`; and teachers, if any.

    `teachers` has paths by name.
    """

    name: str
    path: str
    load_options: Json
    teachers: dict[str, str]


def models_of(settings: RunSettings) -> Models:
    """Find the models, without loading their weights."""
    training, policy = settings.training, settings.policy
    _check(settings)
    trusted = {"trust_remote_code": bool(training.trust_remote_code)}
    options, name = {**trusted, "revision": policy.model_revision}, policy.model_name_or_path
    if settings.command == "train" and training.teacher is None:
        name = name or EMBEDDED
        return Models(name, resolve(name, **options), options, {})
    teachers = teachers_of(training.teacher or EMBEDDED)
    if name is None:
        teacher, options = next(iter(teachers.values())), trusted  # `model_revision` does not apply to a teacher
        name = f"{teacher}:{max(1, layer_count(teacher, **options) * (DROPPED - 1) // DROPPED)}"
    paths = {known: resolve(path, **trusted) for known, path in teachers.items()}
    return Models(name, resolve(name, **options), options, paths)


def _check(settings: RunSettings) -> None:
    policy = settings.policy
    if policy.model_revision != "main" and policy.model_name_or_path is None:
        raise SettingError(
            "`model` with `model_revision`",
            "none",
            "name the model that has this revision; it does not apply to a teacher",
        )
    if settings.training.use_vllm and settings.run.eval_greedy:
        raise SettingError("`eval_greedy` without `use_vllm`", "both", "leave one out: vLLM's sampling is fixed")
    if settings.rewarded and not has_reward(settings.run):
        raise SettingError(
            "a reward for a dataset of prompts",
            "none",
            "give --reward package.module:function, or use klgrad distill, which needs none",
        )


def build(settings: RunSettings, models: Models) -> tuple[RunTrainer, Evaluator]:
    """Load models and data, call each reward function once, and build the trainer and the evaluator."""
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    training = settings.training
    tokenizer = AutoTokenizer.from_pretrained(
        models.path, padding_side="left", truncation_side="left", **models.load_options
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    data = data_of(settings.run, training.seed, conversational=tokenizer.chat_template is not None)
    check_prompts(training, len(data.train))
    rewards = [checked_reward(reward) for reward in data.rewards]
    probe(data.rewards, data.train[0])
    trained = rewards if settings.rewarded else []  # a distillation may be evaluated by rewards it is not trained on
    weights = list(training.reward_weights or [1.0] * len(rewards))
    trainer = _trainer(settings, models, tokenizer, data, trained)
    trainer.remove_callback(PrinterCallback)
    trainer.task_rewards = {reward.__name__: weight for reward, weight in zip(trained, weights, strict=False)}
    comparison = TeacherComparison(list(models.teachers)) if settings.command == "distill" else None
    return trainer, Evaluator(data.evaluation, rewards, weights, training.seed, settings.run.eval_greedy, comparison)


def _trainer(settings: RunSettings, models: Models, tokenizer: Any, data: Data, rewards: list[Reward]) -> RunTrainer:
    from trl import get_peft_config, get_quantization_config  # pyright: ignore[reportPrivateImportUsage]

    training, policy = settings.training, settings.policy
    asked = teachers_of(training.teacher)  # a name that was given stays: a column of the dataset may have it
    named = [path if asked.get(name, name) == name else f"{name}={path}" for name, path in models.teachers.items()]
    training.teacher = ",".join(named) or None
    how: Json = {"attn_implementation": policy.attn_implementation, "revision": policy.model_revision}
    how = {name: x for name, x in {"dtype": policy.dtype, **how}.items() if x is not None}
    declared: Any = training.model_init_kwargs or {}
    training.model_init_kwargs = how | dict(declared)
    return RunTrainer(
        models.path,
        rewards or None,
        training,
        train_dataset=data.train,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(policy),
        peft_config=get_peft_config(policy),
    )
