"""Faults put into a copy of the kernels on purpose: each must break a check."""

import pytest
from kernels import checks
from mutants import planted

MUTATIONS = {
    "the reference's probability dropped": (
        "state.logit_gradient", "out = out - w_forward * log_q.exp()", "out = out", checks.recomputed),
    "the entropy dropped from alpha": (
        "state.gradient_numbers", " - w.entropy * statistics.entropy", "", checks.recomputed),
    "further entries dropped from alpha": (
        "state.gradient_numbers", "w.logp if elsewhere is None else w.logp + elsewhere", "w.logp", checks.recomputed),
    "wrong sign of the lag": ("state.merge", "+ lag * s.sum_p_delta", "- lag * s.sum_p_delta", checks.exchanged),
    "wrong sign of the other lag": (
        "state.merge", "- lag * s.ref_sum_p_delta", "+ lag * s.ref_sum_p_delta", checks.exchanged),
    "energy of parts not moved": ("state.merge", "(sum_p_logit + drop * mass)", "sum_p_logit", checks.recomputed),
    "series everywhere": (
        "state.bregman_terms", "near = (a - b).abs() < NEAR[d.dtype]", "near = d == d", checks.exchanged),
    "series nowhere": ("state.bregman_terms", "near = (a - b).abs() < NEAR[d.dtype]", "near = d != d", checks.near),
    "bans kept in the sums": ("state.difference", "torch.where(d.abs() > BANNED, 0.0, d)", "d", checks.banned),
    "bans not counted": ("state.finish", "torch.where(s.banned_mass > 0, torch.inf, ", "(", checks.banned),
    "slope of the soft-cap forgotten": (
        "head.Transform.slope", "slope * (1 - (logits * (self.temperature / self.softcap)) ** 2)", "slope",
        checks.kept_with_cap),
    "temperature forgotten in the slope": (
        "head.Transform.slope", "slope = self.scale / self.temperature", "slope = self.scale", checks.kept_with_cap),
    "kept differences without the tops": (
        "tiles_torch.gradient", " + (top - ref_top) - lse_difference", " - lse_difference", checks.kept),
    "kept differences without the difference of log-sum-exps": (
        "tiles_torch.gradient", "ref_top) - lse_difference\n            pair", "ref_top)\n            pair",
        checks.kept),
    "kept logits without their top": ("tiles_torch.gradient", "z = a + top", "z = a", checks.kept),
    "kept differences without their mean": (
        "tiling.CachedLogits.load", "torch.where(likelier, mean, 0.0)", "0.0", checks.kept),
    "differences kept whole": (
        "state.mean_difference", "return s.sum_p_delta / s.mass", "return torch.zeros_like(s.mass)",
        checks.confident_tokens),
    "the reference's logit read as the policy's": (
        "tiling.CachedLogits.load", "torch.where(likelier, a_or_minus_b, d - a_or_minus_b), d", "a_or_minus_b, d",
        checks.kept),
    "what was kept read twice": (
        "fused_statistics.StatisticsFunction.backward", "replace(s, kept=None)", "s", checks.second_backward),
    "an entry of another tile taken": (
        "tiling.Tile.locate", "(local >= 0) & (local < self.width)", "local >= 0", checks.recomputed),
    "chunks that overwrite each other": (
        "passes._multiply", "addmm(total.weight[part], to_logits.T, operands.hidden[rows])",
        "matmul(to_logits.T, operands.hidden[rows], out=total.weight[part])", checks.recomputed),
    "uninitialised memory used": (
        "passes.gradients", "len(operands.chunks) != 1", "len(operands.chunks) > 1", checks.no_token),
    "the mean slope left over": (
        "state.with_divergence", "numbers[2] -= weight * mean_slope", "pass", checks.divergence),
    "the divergence of one tile": ("passes._divergences_of", "parts.sum(1)", "parts[:, 0]", checks.divergence),
    "the policy's own outputs counted with each reference": (
        "fused_statistics.StatisticsFunction.backward",
        "of_policy if i == 0 else (state.Upstream(none, none, none, none), None)", "of_policy", checks.several),
    "the gradient towards one reference alone": ("passes._recomputed", "local += to", "pass", checks.several),
    "the mixture weighted the other way": (
        "generators._jensen_shannon_term", "rest * p * p_by_mixture - beta", "rest * p * p_by_mixture + beta",
        checks.divergence),
    "the head's mass left over": (
        "topk._pull", "a.exp() * divergence.slope(a - b)", "a.exp() * (divergence.slope(a - b) + 1)", checks.top_k),
    "the tail's excess as its slope": (
        "topk.sampled_tail_kl", "weight * generator.slope(log_ratio)", "weight * generator.excess(log_ratio)",
        checks.top_k),
    "the head sampled as well": ("topk.sampled_tail_kl", "(~in_head.bool())", "torch.ones_like(in_head)", checks.top_k),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_fault_breaks_its_check(mutation, tmp_path, monkeypatch):
    where, sound, faulty, check = MUTATIONS[mutation]
    package = planted(tmp_path, monkeypatch, f"klgrad.kernels.{where}", sound, faulty)
    with pytest.raises(AssertionError):
        check(package)


@pytest.mark.slow
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_a_copy_without_a_fault_breaks_none(check, tmp_path, monkeypatch):
    package = planted(tmp_path, monkeypatch)
    assert package.__file__.startswith(str(tmp_path))
    check(package)
