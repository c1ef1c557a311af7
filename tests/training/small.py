"""A tiny language model that knows digits, and the settings of a tiny run."""

from pathlib import Path

import tiny

WORDS = (
    "<pad>", "<end>", "<other>", *map(str, range(19)), "+", "-", "*", "Compute", "Reply", "with", "just", "the",
    "number",
)  # fmt: skip


def write_model(folder, layers=3, words=None, tokens=WORDS):
    """A random Llama and a tokenizer of words."""
    from tokenizers import pre_tokenizers

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_key_value_heads": 1}
    tokenizer = tiny.tokenizer_of(tokens, "<other>", pre_tokenizers.Split(".", behavior="isolated"))
    tiny.save(folder, words or len(WORDS), tokenizer, **shape, tie_word_embeddings=True, initializer_range=0.5)
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
