"""A teacher in the place of TRL's reference: found, checked against the student, and loaded by TRL's own code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import KernelInputError, MeaningError


@contextmanager
def as_reference(model: Any, args: Any, given: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """While TRL sets up, let the model's name lead to the teacher, from where TRL loads its reference.

    Gives the model, and the further arguments of the trainer's `__init__`.
    """
    if args.teacher is None:
        yield model, given
        return
    if given.get("peft_config") is not None or hasattr(model, "peft_config"):
        raise MeaningError(
            "a teacher without adapters on the student",
            "both",
            "with adapters the reference is the model without them: merge them, or train all weights",
        )
    student = _loaded(model, args, given) if isinstance(model, str) else model
    if given.get("processing_class") is None:  # or TRL would look for it where the name leads
        given = {**given, "processing_class": _processor(student.config._name_or_path, args)}
    _check_tokenizers(given["processing_class"], args)
    name, how = student.config._name_or_path, args.model_init_kwargs
    # The student is loaded; a revision is its own, and dtype and attention TRL takes over from it.
    args.model_init_kwargs = None
    student.config._name_or_path = args.teacher
    try:
        yield student, given
    finally:
        student.config._name_or_path, args.model_init_kwargs = name, how


def _loaded(name: str, args: Any, given: dict[str, Any]) -> Any:
    """As TRL loads a model that it is given by name."""
    from trl.trainer.utils import create_model_from_path

    how = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    if given.get("quantization_config") is not None:
        how["quantization_config"] = given["quantization_config"]
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        how["device_map"] = None  # TRL's choice too: "auto" fails there
    return create_model_from_path(name, **how)


def _processor(name: str, args: Any) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(
        name,
        revision=(args.model_init_kwargs or {}).get("revision"),
        padding_side="left",
        truncation_side="left",
        trust_remote_code=args.trust_remote_code,
    )


def _check_tokenizers(processor: Any, args: Any) -> None:
    """Both must mean the same by every token; heads may be padded to different lengths beyond."""
    from transformers import AutoTokenizer

    ours = getattr(processor, "tokenizer", processor).get_vocab()
    theirs = AutoTokenizer.from_pretrained(args.teacher, trust_remote_code=args.trust_remote_code).get_vocab()
    if ours == theirs:
        return
    differing = sorted(ours.items() ^ theirs.items(), key=lambda item: item[1])
    raise KernelInputError(
        "teacher and student of one tokenizer",
        f"vocabularies of {len(theirs)} and {len(ours)} tokens; token {differing[0][1]} is not the same",
        "distil within one family of tokenizers",
    )


def shared_vocabulary(models: list[Any]) -> int | None:
    """How many entries all heads have, where one is padded beyond another; None where they agree."""
    sizes = {model.config.get_text_config().vocab_size for model in models}
    return min(sizes) if len(sizes) > 1 else None
