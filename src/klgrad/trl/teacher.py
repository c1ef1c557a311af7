"""The reference: whether there is one, and a teacher in its place, checked and loaded by TRL's own code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import KernelInputError, MeaningError
from ..models.resolve import resolve_embedded
from .config import KLConfig
from .seam.models import has_adapters, load_model, model_name, reference_loaded_from


def has_reference(model: Any, args: KLConfig, given: dict[str, Any]) -> bool:
    """Whether there is a reference: a teacher, the model without its adapters, or the model as its name loads it.

    Without one, kl_coef must be 0.
    """
    adapters = given.get("peft_config") is not None or has_adapters(model)
    if isinstance(model, str) or args.teacher is not None or adapters or model_name(model):
        return True
    if args.kl_coef > 0:
        raise MeaningError(
            "a model with a name or a folder, from which its reference can be loaded",
            "a model object without one",
            "save it by model.save_pretrained(FOLDER), its tokenizer too, and give the folder; or set kl_coef=0",
        )
    return False


@contextmanager
def as_reference(model: Any, args: KLConfig, given: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """While TRL sets up a trainer, make it load the teacher as its reference.

    Args:
        model: the student, or its name.
        args: the configuration, with the teacher's name.
        given: the further arguments of the trainer.

    Yields:
        The model and the further arguments to build the trainer with.
    """
    if args.teacher is None:
        yield model, given
        return
    if given.get("peft_config") is not None or has_adapters(model):
        raise MeaningError(
            "a teacher without adapters on the student",
            "both",
            "with adapters the reference is the model without them: merge them, or train all weights",
        )
    student = load_model(model, args, given.get("quantization_config")) if isinstance(model, str) else model
    if given.get("processing_class") is None:  # TRL would load the teacher's
        given = {**given, "processing_class": _processor(model_name(student), args)}
    teacher = resolve_embedded(args.teacher)
    _check_tokenizers(given["processing_class"], teacher, args)
    with reference_loaded_from(teacher, student, args):
        yield student, given


def _processor(name: str, args: KLConfig) -> Any:
    from transformers import AutoProcessor

    how: Any = args.model_init_kwargs or {}
    return AutoProcessor.from_pretrained(
        name,
        revision=how.get("revision"),
        padding_side="left",
        truncation_side="left",
        trust_remote_code=args.trust_remote_code,
    )


def _check_tokenizers(processor: Any, teacher: str, args: KLConfig) -> None:
    """Both must have the same tokens under the same numbers; their heads may be padded to different lengths."""
    from transformers import AutoTokenizer

    ours = getattr(processor, "tokenizer", processor).get_vocab()
    theirs = AutoTokenizer.from_pretrained(teacher, trust_remote_code=args.trust_remote_code).get_vocab()
    if ours == theirs:
        return
    differing = sorted(ours.items() ^ theirs.items(), key=lambda item: item[1])
    raise KernelInputError(
        "teacher and student with one tokenizer",
        f"vocabularies of {len(theirs)} and {len(ours)} tokens; token {differing[0][1]} is not the same",
        "distil between models that share a tokenizer",
    )
