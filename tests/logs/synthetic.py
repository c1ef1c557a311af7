"""Logs with known contents: sampled from softmaxes, with one fault injected."""

import json
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

ROWS, TOKENS, VOCABULARY, GROUP = 400, 50, 60, 8


def sampled(fault="clean", amount=0.0, *, rows=ROWS, tokens=TOKENS, seed=0, shape="mixed", **faults):
    """(rows, tokens) float32: logp of the trainer, behavior_logp of the sampler, ref_logp; and group.

    Completions of a group share the context of their first token. Faults are `temperature`, `top_p`, `top_k`, `min_p`,
    `dropout`, `stale`, `shift`, `bf16` and `bf16_logits`, one of them by name and amount or several by keyword.
    """
    faults[fault.replace("-", "_")] = amount
    z, ref, group = _contexts(rows, tokens, seed, shape)
    g = torch.Generator().manual_seed(seed + 1000)
    normal = lambda *size: torch.randn(*size, generator=g)
    trainer = sampler = z
    if "stale" in faults:
        noise = normal(*z.shape)
        noise[:, 0] = noise[group * GROUP, 0]
        sampler = sampler + faults["stale"] * noise
    if "temperature" in faults:
        sampler = sampler / faults["temperature"]
    if "top_p" in faults:
        p, order = sampler.softmax(-1).sort(-1, descending=True)
        keep = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p < faults["top_p"])
        sampler = sampler.masked_fill(~keep, -torch.inf)
    if "top_k" in faults:
        sampler = sampler.masked_fill(sampler < sampler.topk(faults["top_k"], -1).values[..., -1:], -torch.inf)
    if "min_p" in faults:
        p = sampler.softmax(-1)
        sampler = sampler.masked_fill(p < faults["min_p"] * p.amax(-1, keepdim=True), -torch.inf)
    if "dropout" in faults:
        trainer = z + faults["dropout"] * normal(*z.shape)
    drawn = torch.multinomial(sampler.softmax(-1).flatten(0, 1), 1, generator=g).reshape(rows, tokens, 1)
    if "bf16_logits" in faults:
        sampler = sampler.bfloat16().float()
    logp, behavior, ref = (_log_prob(x, drawn) for x in (trainer, sampler, ref))
    if "shift" in faults:
        behavior = torch.cat([behavior[:, 1:], behavior[:, :1]], -1)
    if "bf16" in faults or "bf16_logits" in faults:
        behavior = behavior.bfloat16().float()
    return {"logp": logp, "ref_logp": ref, "behavior_logp": behavior, "group": group}


@lru_cache(maxsize=4)
def _contexts(rows, tokens, seed, shape):
    """Logits of policy and reference, and the prompts' numbers."""
    g = torch.Generator().manual_seed(seed)
    z = SHAPES[shape]((rows, tokens), g)
    group = torch.arange(rows) // GROUP
    z[:, 0] = z[group * GROUP, 0]
    return z, z + 0.1 * torch.randn(z.shape, generator=g), group


def _normal(least, most, vocabulary=VOCABULARY):
    """Normal logits with a spread between two bounds; a larger spread makes a context more certain."""

    def logits(size, g):
        scale = least + (most - least) * torch.rand(*size, 1, generator=g)
        return scale * torch.randn(*size, vocabulary, generator=g)

    return logits


def _language(size, g, vocabulary=300):
    """Logits like those of a language model: a long tail by Zipf's law, and one near certain token in most contexts."""
    uniform = lambda: torch.rand(*size, 1, generator=g)
    lead = torch.where(uniform() < 0.6, 2 + 6 * uniform(), 2 * uniform())
    tail = (1.2 + 0.8 * uniform()) * torch.arange(1, vocabulary + 1).log()
    z = 0.5 * torch.randn(*size, vocabulary, generator=g) - tail
    z[..., :1] += lead
    return z


SHAPES = {"mixed": _normal(1, 6), "peaked": _normal(4, 10), "flat": _normal(0.5, 1.5, 200), "language": _language}
"""The shapes of contexts."""


def _log_prob(logits, drawn):
    return logits.log_softmax(-1).gather(-1, drawn)[..., 0]


def mask_of(shape, seed=0):
    """Completions of varying length, one of them empty, with a hole in each long one."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, shape[1] + 1, shape[:1], generator=g)
    lengths[1] = 0
    mask = torch.arange(shape[1]) < lengths[:, None]
    mask[:, 3] = False
    return mask


def write_jsonl(path, data):
    rows = zip(*(x.tolist() for x in data.values()), strict=True)
    path.write_text("".join(json.dumps(dict(zip(data, row, strict=True))) + "\n" for row in rows))


def write_parquet(path, data):
    pq.write_table(pa.table({name: pa.array(list(x.numpy())) for name, x in data.items()}), path)


def write_npz(path, data):
    np.savez(path, **{name: x.numpy() for name, x in data.items()})


WRITERS = {".parquet": write_parquet, ".jsonl": write_jsonl, ".npz": write_npz}


def write(path, data):
    WRITERS[path.suffix](path, data)
    return path
