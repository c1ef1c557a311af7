"""A tiny language model that knows digits, and the settings of a tiny run."""

from pathlib import Path

WORDS = (
    "<pad>", "<end>", "<other>", *map(str, range(19)), "+", "-", "*", "Compute", "Reply", "with", "just", "the",
    "number",
)  # fmt: skip


def write_model(folder, layers=3, words=None, tokens=WORDS):
    """A random Llama and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=words or len(WORDS),
        hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=True,
        initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    by_word = Tokenizer(models.WordLevel({word: i for i, word in enumerate(tokens)}, unk_token="<other>"))
    by_word.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(".", behavior="isolated")]
    )
    PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    return Path(folder)


SMALL = {
    "use_cpu": True,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 5,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "gradient_checkpointing": False,
    "save_steps": 1,
    "save_total_limit": 10,
    "train_size": 32,
    "eval_size": 4,
    "eval_every": 2,
    "seed": 3,
}


def arguments(**settings):
    """As they stand on a command line."""
    found = []
    for name, value in settings.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not None:
            found += [f"--{name}", str(value)]
    return found


def evaluated(job, folder):
    """The work of a job that trains nothing: two evaluations, or an error if its settings ask for one."""
    if job.settings.get("fails"):
        raise ValueError("as asked")
    return [{"update": update, "problem": "" if update < 2 else "not finite"} for update in range(3)]
