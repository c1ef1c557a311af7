"""Faults put into a copy of the kernels on purpose: each must be caught by a test."""

import pytest
from mutants import check_caught
from some import first

FAULTS = {
    "the reference's probability dropped": (
        "state.logit_gradient", "out = out - w_forward * log_q.exp()", "out = out",
        "test_fused_statistics.py::test_each_output_alone"),
    "further entries dropped from alpha": (
        "state.gradient_numbers", "w.logp if elsewhere is None else w.logp + elsewhere", "w.logp",
        "test_fused_statistics.py::test_each_output_alone"),
    "wrong sign of the lag": (
        "state.merge", "+ lag * s.sum_p_delta", "- lag * s.sum_p_delta",
        "test_state.py::test_any_partition_in_any_order_merges_to_the_whole"),
    "series nowhere": (
        "state.bregman_terms", "near = (a - b).abs() < NEAR[d.dtype]", "near = d != d",
        "test_state.py::test_a_small_kl_is_right_in_single_precision"),
    "bans kept in the sums": (
        "state.difference", "torch.where(d.abs() > BANNED, 0.0, d)", "d",
        "test_state.py::test_an_entry_that_one_bans_makes_one_kl_infinite_and_leaves_the_other_right"),
    "bans not counted": (
        "state.finish", "torch.where(s.banned_mass > 0, torch.inf, ", "(",
        "test_state.py::test_an_entry_that_one_bans_makes_one_kl_infinite_and_leaves_the_other_right"),
    "temperature forgotten in the slope": (
        "head.Transform.slope", "slope = self.scale / self.temperature", "slope = self.scale",
        "test_fused_statistics.py::test_every_transform_however_much_is_kept"),
    "kept differences without their mean": (
        "tiling.CachedLogits.load", "torch.where(likelier, mean, 0.0)", "0.0",
        "test_fused_statistics.py::test_every_transform_however_much_is_kept"),
    "differences kept whole": (
        "state.mean_difference", "return s.sum_p_delta / s.mass", "return torch.zeros_like(s.mass)",
        "test_passes.py::test_confident_tokens_over_many_slices"),
    "what was kept read twice": (
        "fused_statistics.StatisticsFunction.backward", "replace(s, kept=None)", "s",
        "test_fused_statistics.py::test_a_second_backward_pass_gives_the_same_gradient"),
    "an entry of another tile taken": (
        "tiling.Tile.locate", "(local >= 0) & (local < self.width)", "local >= 0",
        "test_fused_statistics.py::test_every_transform_however_much_is_kept"),
    "chunks that overwrite each other": (
        "passes._multiply", "addmm(total.weight[part], to_logits.T, operands.hidden[rows])",
        "matmul(to_logits.T, operands.hidden[rows], out=total.weight[part])",
        "test_fused_statistics.py::test_every_transform_however_much_is_kept"),
    "uninitialised memory used": (
        "passes.gradients", "len(operands.chunks) != 1", "len(operands.chunks) > 1",
        "test_fused_statistics.py::test_without_a_live_token_everything_is_zero"),
    "the mean slope left over": (
        "state.with_divergence", "numbers[2] -= weight * mean_slope", "pass",
        "test_tiles_torch.py::test_value_and_gradient"),
    "the policy's own outputs counted with each reference": (
        "fused_statistics.StatisticsFunction.backward",
        "of_policy if i == 0 else (state.Upstream(none, none, none, none), None)", "of_policy",
        "test_fused_statistics.py::test_value_and_gradient_are_the_weighted_sums"),
    "the gradient towards one reference alone": (
        "passes._recomputed", "local += to", "pass",
        "test_fused_statistics.py::test_value_and_gradient_are_the_weighted_sums"),
    "the head's mass left over": (
        "topk._pull", "a.exp() * divergence.slope(a - b)", "a.exp() * (divergence.slope(a - b) + 1)",
        "test_topk.py::test_head_and_sampled_tail_are_unbiased_in_value_and_in_gradient"),
    "the head sampled as well": (
        "topk.sampled_tail_kl", "(~in_head.bool())", "torch.ones_like(in_head)",
        "test_topk.py::test_head_and_sampled_tail_are_unbiased_in_value_and_in_gradient"),
    "a masked row read": (
        "tiles_triton._statistics_kernel", "place = tl.load(places_ptr + row) if PLACES else row", "place = row",
        "interpreted.py::test_from_masked_logits"),
    "the slope dropped": (
        "tiles_triton._gradient_kernel", "(gradient * slope).to(", "gradient.to(", "interpreted.py::test_gradient"),
    "the partial slice summed": (
        "tiles_triton._logits", "z = tl.where(live, z, LOWEST)", "z = z", "interpreted.py::test_statistics"),
    "NaN taken for a ban": (
        "tiles_triton._logits", "tl.where(z < LOWEST, LOWEST, z)", "tl.maximum(z, LOWEST)",
        "interpreted.py::test_nan_is_not_treated_as_a_ban"),
    "the mark of the kernel's slice": (
        "tiles_triton._gradient_kernel", "row * state_stride + mark", "row * state_stride + 0 * mark",
        "interpreted.py::test_gradient_from_logits_with_marks"),
    "offsets of 32 bits": (
        "tiles_triton._gradient_kernel", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)",
        "interpreted.py::test_rows_of_more_than_two_billion_entries_in_all"),
    "fields of 32 bits": (
        "tiles_triton._statistics_kernel", "field_stride = tl.cast(field_stride, tl.int64)  #", "pass  #",
        "interpreted.py::test_states_with_fields_of_more_than_two_billion_numbers_in_all"),
    "a mixture of which only one part counts": (
        "tiles_triton._divergence_kernel", "term += PARTS[i][0] *", "term = PARTS[i][0] *",
        "interpreted.py::test_divergences"),
    "bans not counted, in Triton": (
        "tiles_triton._statistics_kernel", "tl.where(d > BANNED, p, 0.0)", "0 * p", "interpreted.py::test_statistics"),
    "one series for both KLs": (
        "hopper.gluon.terms", "forward = (square - reverse) - reverse * d", "forward = square - reverse",
        "test_hopper.py::test_terms_are_those_of_a_state"),
    "differences kept whole, on Hopper": (
        "hopper.gluon.kept_pair", "d - mean, d)", "d, d)", "test_hopper.py::test_the_kept_pair_is_that_of_kept"),
    "a above zero": (
        "hopper.gluon.kept_pair", "gl.minimum(a, 0.0)", "a",
        "test_hopper.py::test_a_maximum_above_zero_by_rounding_is_kept_as_zero"),
    "no difference of log-sum-exps": (
        "hopper.gluon.logit_gradient", "(z - z_ref) - lse_difference", "(z - z_ref)",
        "test_hopper.py::test_the_gradient_is_that_of_the_weights"),
}  # fmt: skip
"""Where the fault is, the sound text, the faulty text, and the test that must fail."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", first(FAULTS, 2))
def test_a_fault_is_caught(fault, tmp_path):
    where, sound, faulty, test = FAULTS[fault]
    by_triton = test.startswith("interpreted")
    if by_triton or test.startswith("test_hopper"):
        pytest.importorskip("triton")
    # numpy warns in the interpreter, of infinities that a GPU passes over in silence
    options, environment = (["-W", "ignore::RuntimeWarning"], {"TRITON_INTERPRET": "1"}) if by_triton else ([], {})
    check_caught(tmp_path, (f"klgrad.kernels.{where}", sound, faulty), f"tests/kernels/{test}", *options, **environment)
