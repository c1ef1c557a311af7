"""Losses as users of JAX write them."""

from functools import partial

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]


def k1(logp, ref_logp):
    return logp - ref_logp


@jax.jit
def k2(logp, ref_logp, mask):
    return (jnp.square(logp - ref_logp) / 2 * mask).sum() / len(mask)


def k3(logp, ref_logp, mask, beta=1.0):
    x = ref_logp - logp
    kl = jnp.exp(x) - x - 1
    return beta * (kl * mask).sum(-1), {"kl": kl.mean()}


def k3_in_float32(logp, ref_logp, mask):
    return k3(logp.astype(jnp.float32), ref_logp.astype(jnp.float32), mask)


def in_reward(batch):
    """k1 to go, as an advantage."""
    kl = jax.lax.stop_gradient(batch["logp"] - batch.ref_logp) * batch.mask
    to_go = jnp.cumsum(kl[:, ::-1], -1)[:, ::-1]
    return {"loss": (to_go * batch["log_prob"] * batch["mask"]).sum() / len(kl)}


def distilled(logits, ref_logits, mask):
    student, teacher = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
    return ((jnp.exp(teacher) * (teacher - student)).sum(-1) * mask).sum() / len(mask)


class Penalty:
    def __init__(self, beta=0.5):
        self.beta = beta

    def __call__(self, logp, ref_logp):
        return self.beta * k1(logp, ref_logp) ** 2 / 2


halved = partial(k3, beta=0.5)


def by_value(logp, ref_logp):
    return logp if (logp > ref_logp).any() else ref_logp


def torch_bridge(logp, ref_logp):
    """Converts by itself."""
    import torch

    return torch.as_tensor(logp - ref_logp)
