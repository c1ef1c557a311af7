"""A genuine language model inside a trainer of TRL's: a tiny Llama in float64, enumerated wholly.

Four words and completions of at most two. What a trainer's loss gives the parameters, summed over all groups of two, is
to be the gradient of a divergence that is computed here from plain logits.
"""

import itertools
from collections import Counter
from contextlib import contextmanager

import torch

from klgrad.frameworks.trl_stage import build, in_float64

WORDS = ("<pad>", "<end>", "a", "b")
END, LIMIT, PROMPT = 1, 2, "b a"
COMPLETIONS = [(END,), *((first, last) for first in (0, 2, 3) for last in range(4))]
PREFIXES = [(), (0,), (2,), (3,)]


@contextmanager
def everything_in_float64():
    from transformers.models.llama import modeling_llama
    from trl.kernels import chunked_logprob

    with in_float64(chunked_logprob, modeling_llama):
        yield


def random_weights(model, seed):
    torch.manual_seed(seed)
    model.double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)


def trainer_of(kind, **settings):
    trainer = build(kind, 2, lambda completions, **_: [0.0] * len(completions), WORDS, **settings)
    trainer.max_completion_length = LIMIT
    random_weights(trainer.model, 1)
    random_weights(trainer.ref_model, 2)
    return trainer


def loss_of(trainer, prompts, completions, sampler=None):
    """TRL's loss of completions of these prompts, the policy itself having sampled them unless another is given."""
    ids = [list(completion) for completion in completions]
    trainer._generate_single_turn = lambda *_, **__: (ids, None) if hasattr(trainer, "loss_type") else ids
    scored = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts])
    if sampler is not None:
        old = [torch.stack([sampler[y[:t]][word].detach() for t, word in enumerate(y)]) for y in completions]
        scored["old_per_token_logps"] = torch.nn.utils.rnn.pad_sequence(old, batch_first=True)
    return trainer._compute_loss(trainer.model, scored)


def gradient_of(trainer, value):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(trainer.model.parameters()))])


def next_word(model, temperature):
    """Log-probs of the next word after each prefix, by a plain call of the model."""
    prompt = [WORDS.index(word) for word in PROMPT.split()]
    table = {}
    for prefix in PREFIXES:
        logits = model(input_ids=torch.tensor([[*prompt, *prefix]])).logits[0, -1]
        table[prefix] = torch.log_softmax(logits / temperature, -1)
    return table


def completion_logp(table, completion):
    return torch.stack([table[completion[:t]][word] for t, word in enumerate(completion)]).sum()


def token_level(kl, sampler=None):
    """KLs of the next word, at prefixes as the policy (or another) visits them, the visits held fixed."""

    def divergence(policy, ref):
        visits = [completion_logp(sampler or policy, prefix) if prefix else torch.zeros(()) for prefix in PREFIXES]
        return sum(v.exp().detach() * kl(policy[x], ref[x]) for v, x in zip(visits, PREFIXES, strict=True))

    return divergence


def reverse_kl(p, q):
    return (p.exp() * (p - q)).sum()


def forward_kl(p, q):
    return reverse_kl(q, p)


def lumped(k):
    """The reverse KL over the reference's k likeliest words and one lump of the others."""

    def divergence(p, q):
        best = q.topk(k).indices
        rest = torch.tensor([i for i in range(len(q)) if i not in best])
        both = [torch.cat([x[best], x[rest].logsumexp(0, keepdim=True)]) for x in (p, q)]
        return reverse_kl(*both)

    return divergence


def sequence_reverse_kl(policy, ref):
    logp, ref_logp = (torch.stack([completion_logp(t, y) for y in COMPLETIONS]) for t in (policy, ref))
    return (logp.exp() * (logp - ref_logp)).sum()


def policies(trainer, temperature=1.0):
    return [next_word(model, temperature) for model in (trainer.model, trainer.ref_model)]


def expected_gradient(trainer, policy, *, stale=False):
    """The mean over every group of two that the policy samples of the gradient of the trainer's loss.

    Where it is `stale` it is another policy than the trainer's, and its log-probs come along.
    """
    probability = {y: float(completion_logp(policy, y).exp().detach()) for y in COMPLETIONS}
    assert abs(sum(probability.values()) - 1) < 1e-9
    found = torch.zeros(())
    groups = Counter(tuple(sorted(group)) for group in itertools.product(COMPLETIONS, repeat=2))
    for (one, other), orders in groups.items():
        gradient = gradient_of(trainer, loss_of(trainer, [PROMPT] * 2, [one, other], policy if stale else None))
        found = found + orders * probability[one] * probability[other] * gradient
    return found
