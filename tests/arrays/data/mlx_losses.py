"""Losses as users of MLX write them."""

import mlx.core as mx  # pyright: ignore[reportMissingImports]


def k1(logp, ref_logp):
    return logp - ref_logp


@mx.compile
def k2(logp, ref_logp, mask):
    return (mx.square(logp - ref_logp) / 2 * mask).sum() / mask.shape[0]


def k3(logp, ref_logp, mask, beta=1.0):
    x = ref_logp - logp
    kl = mx.exp(x) - x - 1
    return beta * (kl * mask).sum(-1), {"kl": kl.mean(), "each": kl}


def in_reward(batch):
    """k1 to go, as an advantage."""
    kl = mx.stop_gradient(batch["logp"] - batch.ref_logp) * batch.mask
    to_go = mx.cumsum(kl, axis=-1, reverse=True)
    return {"loss": (to_go * batch["log_prob"] * batch["mask"]).sum() / kl.shape[0]}


def distilled(logits, ref_logits, mask):
    student, teacher = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (logits, ref_logits))
    return ((mx.exp(teacher) * (teacher - student)).sum(-1) * mask).sum() / mask.shape[0]


def k3_in_reward(logp, ref_logp):
    return mx.stop_gradient(k3(logp, ref_logp, 1)[1]["each"]) * logp
