"""From settings to a trainer that is ready: models, prompts, rewards, all checked before anything is trained."""

from dataclasses import dataclass
from typing import Any

from ..trl.sanity import check_prompts
from .data import Data, data_of, reward_count
from .describe import rewarded
from .evaluate import Evaluator
from .model import EMBEDDED, layer_count, resolve
from .rewards import guarded, probe
from .run_trainer import RunTrainer
from .settings import Settings
from .training_errors import SettingError

DROPPED = 3
"""A student that nobody chose misses one layer in so many of its teacher's."""


@dataclass(frozen=True)
class Models:
    """What is trained and what it is held to, by name for people and as transformers finds and loads them."""

    name: str
    path: str
    how: dict[str, Any]
    reference_name: str
    reference: str
    reference_how: dict[str, Any]


def models_of(settings: Settings) -> Models:
    """Find both; nothing is loaded yet."""
    run, training, policy = settings.run, settings.training, settings.policy
    _check(settings)
    trusted = {"trust_remote_code": bool(training.trust_remote_code)}
    how = {**trusted, "revision": policy.model_revision}
    if settings.command == "train" and training.teacher is None:
        name = policy.model_name_or_path or EMBEDDED
        path = resolve(name, run.student_layers, **how)
        return Models(_spoken(name, run.student_layers), path, how, name, path, how)
    teacher = training.teacher or EMBEDDED
    name, layers = policy.model_name_or_path, run.student_layers
    if name is None:
        name, how = teacher, trusted  # a revision is the model's own
        layers = layers if layers is not None else max(1, layer_count(teacher, **how) * (DROPPED - 1) // DROPPED)
    return Models(
        _spoken(name, layers), resolve(name, layers, **how), how, teacher, resolve(teacher, **trusted), trusted
    )


def _spoken(name: str, layers: int | None) -> str:
    return name if layers is None else f"{name} with {layers} layers"


def _check(settings: Settings) -> None:
    training, policy = settings.training, settings.policy
    if training.teacher is not None and policy.use_peft:
        raise SettingError(
            "a teacher without `use_peft`",
            "both",
            "with adapters the reference is the model without them, not the teacher",
        )
    if policy.model_revision != "main" and policy.model_name_or_path is None:
        raise SettingError(
            "`model` with `model_revision`", "none", "name the model that has this revision; a teacher takes none"
        )
    if training.use_vllm and settings.run.eval_greedy:
        raise SettingError(
            "`eval_greedy` without `use_vllm`", "both", "drop one of them: vLLM is told how to sample once for all"
        )
    _check_rewards(settings)
    if training.save_only_model and str(training.save_strategy) != "SaveStrategy.NO":
        raise SettingError("whole checkpoints", "save_only_model=True", "leave it out: a run could not go on from them")


def _check_rewards(settings: Settings) -> None:
    """As many weights as rewards, of which there is one at least to train with."""
    count, weights = reward_count(settings.run), settings.training.reward_weights
    if not rewarded(settings):
        count = 0
    elif count == 0:
        raise SettingError(
            "a reward for a dataset of one's own",
            "none",
            "--reward package.module:function, or klgrad distill, which needs none",
        )
    if weights is not None and len(weights) != count:
        raise SettingError(
            f"{count} `reward_weights`, one for each reward",
            f"{len(weights)}",
            "name as many, in the order of --reward" if count else "drop them: nothing is rewarded here",
        )


def build(settings: Settings, models: Models) -> tuple[RunTrainer, Evaluator]:
    """Load everything, try the rewards, and put it together."""
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    training = settings.training
    tokenizer = AutoTokenizer.from_pretrained(models.path, padding_side="left", truncation_side="left", **models.how)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    data = data_of(settings.run, training.seed, conversational=tokenizer.chat_template is not None)
    check_prompts(training, len(data.train))
    rewards = [guarded(reward) for reward in data.rewards]
    probe(data.rewards, data.train[0])
    trained = rewards if rewarded(settings) else []  # a distillation may be judged by what does not reward it
    weights = list(training.reward_weights or [1.0] * len(rewards))
    trainer = _trainer(settings, models, tokenizer, data, trained)
    trainer.remove_callback(PrinterCallback)
    trainer.task_rewards = {reward.__name__: weight for reward, weight in zip(trained, weights, strict=False)}
    return trainer, Evaluator(data.evaluation, rewards, weights, training.seed, settings.run.eval_greedy)


def _trainer(settings: Settings, models: Models, tokenizer: Any, data: Data, rewards: list[Any]) -> RunTrainer:
    from trl.trainer.utils import get_peft_config, get_quantization_config

    training, policy = settings.training, settings.policy
    training.teacher = models.reference if settings.command == "distill" or training.teacher else None
    chosen = {
        "dtype": policy.dtype,
        "attn_implementation": policy.attn_implementation,
        "revision": policy.model_revision,
    }
    given: Any = training.model_init_kwargs or {}
    training.model_init_kwargs = {k: v for k, v in chosen.items() if v is not None} | dict(given)
    return RunTrainer(
        models.path,
        rewards or None,
        training,
        train_dataset=data.train,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(policy),
        peft_config=get_peft_config(policy),
    )
