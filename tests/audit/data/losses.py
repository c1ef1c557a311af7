"""Losses as they are found in training code: names, signatures and results in the styles of several libraries."""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


def _k3(log_ratio):
    return torch.exp(-log_ratio) - 1 + log_ratio


# In the style of TRL.


def grpo_k3(per_token_logps, ref_per_token_logps, completion_mask, beta=0.04):
    log_ratio = per_token_logps - ref_per_token_logps
    return beta * (_k3(log_ratio) * completion_mask).sum(-1).mean()


def grpo_whole(inputs):
    logps, mask = inputs["per_token_logps"], inputs["completion_mask"]
    advantages = inputs["advantages"].unsqueeze(1)
    old = inputs.get("old_per_token_logps")
    ratio = torch.exp(logps - (logps.detach() if old is None else old))
    per_token = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    per_token = per_token + 0.04 * _k3(logps - inputs["ref_per_token_logps"])
    return ((per_token * mask).sum(1) / mask.sum(1)).mean()


def grpo_corrected_k3(per_token_logps, old_per_token_logps, ref_per_token_logps, completion_mask):
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    kl = ratio * _k3(per_token_logps - ref_per_token_logps)
    return (kl * completion_mask).sum() / completion_mask.size(0)


def rloo_reward(per_token_logps, old_per_token_logps, ref_per_token_logps, completion_mask, advantages, beta=0.05):
    penalty = ((old_per_token_logps - ref_per_token_logps) * completion_mask).sum(1)
    reward = advantages - beta * penalty
    return -(reward.detach() * (per_token_logps * completion_mask).sum(1)).mean()


def jsd(student_logits, teacher_logits, labels=None, beta=0.5, temperature=1.0, reduction="batchmean"):
    student = F.log_softmax(student_logits / temperature, dim=-1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=-1)
    if beta == 0:
        out = F.kl_div(student, teacher, reduction="none", log_target=True)
    elif beta == 1:
        out = F.kl_div(teacher, student, reduction="none", log_target=True)
    else:
        mixed = torch.log((1 - beta) * student.exp() + beta * teacher.exp())
        to_teacher = F.kl_div(mixed, teacher, reduction="none", log_target=True)
        to_student = F.kl_div(mixed, student, reduction="none", log_target=True)
        out = beta * to_teacher + (1 - beta) * to_student
    if labels is not None:
        out = out[labels != -100]
    return out.sum() / student_logits.size(0)


forward_jsd = functools.partial(jsd, beta=0)
reverse_jsd = functools.partial(jsd, beta=1)


# In the style of verl.


def kl_penalty(logprob, ref_logprob, kl_penalty):
    if kl_penalty == "kl":
        return logprob - ref_logprob
    if kl_penalty == "mse":
        return 0.5 * (logprob - ref_logprob).square()
    if kl_penalty == "low_var_kl":
        kl = torch.clamp(ref_logprob - logprob, min=-20, max=20)
        return torch.clamp(torch.exp(kl) - kl - 1, min=-10, max=10)
    raise NotImplementedError(kl_penalty)


def policy_loss(old_log_prob, log_prob, advantages, response_mask, cliprange=0.2, loss_agg_mode="seq-mean-token-sum"):
    ratio = torch.exp(log_prob - old_log_prob)
    losses = torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - cliprange, 1 + cliprange))
    loss = torch.mean(torch.sum(losses * response_mask, dim=-1))
    return loss, {"clipfrac": torch.gt(ratio, 1 + cliprange).float().mean().item()}


def update_actor(data):
    batch = data.batch
    log_prob, mask = batch["log_prob"], batch["response_mask"]
    kl = 0.5 * (log_prob - batch["ref_log_prob"]) ** 2
    return (kl * mask).sum(-1).mean(), {}


def micro_batch_k1(model_inputs: dict):
    kl = model_inputs["log_prob"] - model_inputs["ref_log_prob"]
    return {"loss": (kl * model_inputs["response_mask"]).sum(-1).mean(), "entropy": torch.zeros(())}


# In the style of OpenRLHF.


class PolicyLoss(nn.Module):
    """The clipped policy loss."""

    def __init__(self, clip_eps=0.2):
        super().__init__()
        self.clip_eps = clip_eps

    def forward(self, log_probs, old_log_probs, advantages, action_mask=None):
        ratio = (log_probs - old_log_probs).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps) * advantages)
        return (loss * action_mask).sum(-1).mean()


def approx_kl(log_probs, log_probs_base, kl_estimator="k1"):
    log_ratio = log_probs.float() - log_probs_base.float()
    if kl_estimator == "k2":
        return log_ratio**2 / 2.0
    if kl_estimator == "k3":
        return (-log_ratio).exp() - 1 + log_ratio
    return log_ratio


class KLLoss(nn.Module):
    """A penalty with a coefficient."""

    def __init__(self, coef):
        super().__init__()
        self.coef = coef

    def forward(self, action_log_probs, base_action_log_probs, action_mask):
        kl = (action_log_probs - base_action_log_probs) ** 2 / 2
        return self.coef * (kl * action_mask).sum(dim=-1)


kl_loss = KLLoss(coef=0.1)


class KDLoss(nn.Module):
    def forward(self, logits, teacher_logits, label):
        teacher = F.softmax(teacher_logits, dim=-1, dtype=torch.float32)
        x = (teacher * F.log_softmax(logits, dim=-1)).sum(-1).view(-1)
        mask = (label != -100).int()
        return -(x * mask.view(-1)).sum() / mask.view(-1).sum()


# Distillation scripts.


def reverse_kd(logits, ref_logits, attention_mask):
    student, teacher = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    kl = (student.exp() * (student - teacher)).sum(-1)
    return (kl * attention_mask).sum() / len(logits)


def forward_kd(student_logits, teacher_logits, loss_mask):
    kl = F.kl_div(student_logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="none").sum(-1)
    return (kl * loss_mask).sum(1).mean()


def forward_kd_per_entry(student_logits, teacher_logits):
    return F.kl_div(student_logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="none")


def shifted_kd(student_logits, teacher_logits, labels):
    shift_student, shift_teacher = student_logits[..., :-1, :], teacher_logits[..., :-1, :]
    live = labels[..., 1:] != -100
    kl = F.kl_div(shift_student.log_softmax(-1), shift_teacher.log_softmax(-1), reduction="none", log_target=True)
    return kl.sum(-1)[live].sum() / len(labels)


def top_k_kd(student_logits, teacher_logits, mask, k=20):
    values, at = teacher_logits.topk(k, dim=-1)
    student = student_logits.log_softmax(-1).gather(-1, at)
    kl = (values.softmax(-1) * (values.log_softmax(-1) - student)).sum(-1)
    return (kl * mask).sum() / len(mask)


def uld(student_logits, teacher_logits, mask):
    student = student_logits.softmax(-1).sort(-1, descending=True).values
    teacher = teacher_logits.softmax(-1).sort(-1, descending=True).values
    return ((student - teacher).abs().sum(-1) * mask).sum() / len(mask)


def mse_of_logits(student_logits, teacher_logits, mask):
    return ((student_logits - teacher_logits).square().mean(-1) * mask).sum() / len(mask)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="sum") / len(labels)


def k2_from_logits(logits, ref_logits, completion_ids, completion_mask):
    pick = lambda x: x.log_softmax(-1).gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)
    return (0.5 * (pick(logits) - pick(ref_logits)) ** 2 * completion_mask).sum() / len(logits)


def on_policy_distillation(student_logprobs, teacher_logprobs, mask):
    advantages = -(student_logprobs - teacher_logprobs).detach()
    return -(advantages * student_logprobs * mask).sum() / mask.shape[0]


# Scripts written by hand.


def k2_in_a_dict(new_logprobs, ref_logprobs, mask):
    return {"loss": ((new_logprobs - ref_logprobs).pow(2) / 2 * mask).sum(-1).mean(), "kl": 0.0}


def k2_per_completion(log_pi, log_pi_ref, mask):
    return ((log_pi - log_pi_ref) ** 2 / 2 * mask).sum(-1)


def k2_in_an_object(policy_logps, reference_logps, mask):
    return SimpleNamespace(loss=((policy_logps - reference_logps) ** 2 / 2 * mask).sum(-1).mean(), metrics={})


def k3_with_numbers_as_mask(logp, logp_ref, mask):
    kl = _k3(logp - logp_ref).masked_fill((1 - mask).bool(), 0.0)
    return kl.sum(-1).mean()


def forgot_the_mask(logp, ref_logp):
    return (0.5 * (logp - ref_logp) ** 2).mean()


def forgot_the_mask_of_logits(student_logits, teacher_logits):
    return F.kl_div(student_logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="batchmean")


def k3_of_keywords(**batch):
    return (_k3(batch["logp"] - batch["ref_logp"]) * batch["mask"]).sum(-1).mean()


def k3_of_attributes(batch):
    return (_k3(batch.log_prob - batch.ref_log_prob) * batch.response_mask).sum(-1).mean()


@dataclass
class Penalty:
    beta: float = 0.1
    kind: str = "k2"

    def __call__(self, curr_logprobs, ref_logprobs, mask):
        log_ratio = curr_logprobs - ref_logprobs
        kl = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": _k3(log_ratio)}[self.kind]
        return self.beta * (kl * mask).sum(-1).mean()


class Trainer:
    beta = 0.1

    def compute_kl(self, logp, ref_logp, mask):
        return self.beta * (_k3(logp - ref_logp) * mask).sum(-1).mean()


def with_cfg(logp, ref_logp, mask, cfg):
    return cfg["beta"] * ((logp - ref_logp) ** 2 / 2 * mask).sum(-1).mean()
