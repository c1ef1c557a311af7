"""Faults put into a copy of the package on purpose: each must be caught by a test."""

import pytest
from mutants import check_caught
from some import first

FAULTS = {
    "errors without the correction for few clusters": (
        "core.result.RatioSums.estimates", "(self.square / left)", "(self.square)",
        "core/test_result.py::test_equal_counts_have_the_textbook_error_and_degrees_of_freedom"),
    "a prompt's completions counted as independent": (
        "reports.Totals.estimates", "self._clustered() or self._sums", "self._sums",
        "logs/test_examination.py::test_the_numbers_are_those_of_their_definitions"),
    "batches about means of their own": (
        "core.result.RatioSums._about", "off = mean - _ratio(self.total, self.count)", "off = 0 * mean",
        "core/test_result.py::test_any_parts_add_up_to_the_whole"),
    "token ratios for prefix ratios": (
        "reports.Ratios.add", "prefix_ratio(rollout)[live]", "token_ratio(rollout)[live]",
        "logs/test_examination.py::test_the_numbers_are_those_of_their_definitions"),
    "a ratio without a token": (
        "reports.Ratios.add", "sequence_ratio(rollout)[live.any(-1), 0]", "sequence_ratio(rollout)[:, 0]",
        "logs/test_examination.py::test_the_numbers_are_those_of_their_definitions"),
    "the mismatch the other way round": (
        "reports.MismatchSums.add", "away = -rollout.log_ratio", "away = rollout.log_ratio",
        "reports/test_reports.py::test_mismatch_estimates_the_kl_of_the_sampler_to_the_trainer"),
    "coefficients of a mean": (
        "logs.coefficients.coefficients", "gradient * len(rollout.logp)", "gradient",
        "logs/test_examination.py::test_coefficients_are_compared_as_on_one_batch"),
    "a sign of the difference": (
        "logs.coefficients.CoefficientSums.add", "(c - s) @ (c - s)", "(c + s) @ (c + s)",
        "logs/test_examination.py::test_coefficients_are_compared_as_on_one_batch"),
    "what is alive counted as dead": (
        "logs.coefficients.CoefficientSums.add", "c.abs() < DEAD", "c.abs() > DEAD",
        "logs/test_examination.py::test_a_clamped_cell_has_its_dead_zone_counted"),
    "lengths with dead tokens": (
        "logs.reader.Log.chunks", "lengths = counted[ends] - counted[ends - lengths]", "pass",
        "logs/test_examination.py::test_the_report_is_that_of_one_batch"),
    "padding taken for tokens": (
        "logs.examination._pad", "steps < lengths[:, None]", "steps <= lengths[:, None]",
        "logs/test_examination.py::test_the_report_is_that_of_one_batch"),
    "values of dead tokens": (
        "logs.reader.Log._check_values", "is_invalid(x) & live", "is_invalid(x)",
        "logs/test_reader.py::test_places_count_masked_tokens_and_masked_values_do_not_matter"),
    "the other neighbour": (
        "logs.mismatch.Evidence.add",
        "(rollout.sampler_logp, rollout.logp, live)", "(rollout.logp, rollout.sampler_logp, live)",
        "logs/test_mismatch.py::test_a_shift_is_named_with_its_direction"),
    "repeats of any token": (
        "logs.mismatch.compare_first_tokens", "& (y[1:] == y[:-1])", "",
        "logs/test_mismatch.py::test_dropout_is_told_from_other_weights_only_where_prompts_repeat"),
    "limits on the other side": (
        "logs.mismatch._beyond", "limit - y if a > 1 else y - limit", "y - limit",
        "logs/test_mismatch.py::test_the_limits_hold_for_every_token_of_every_context"),
    "limits of the log-prob": (
        "logs.mismatch.possible_temperatures", "x - torch.log(-torch.expm1(x))", "x - 0",
        "logs/test_mismatch.py::test_the_limits_hold_for_every_token_of_every_context"),
    "a filter where the mass is above 1": (
        "logs.mismatch.find_filter", "mean + 5 * error < 1", "mean - 5 * error > 1",
        "logs/test_mismatch.py::test_a_filter_is_named_with_the_mass_it_kept"),
    "noise taken for what is systematic": (
        "logs.mismatch.find_randomness", "repeats.noise > 0.5", "repeats.noise < 0.5",
        "logs/test_mismatch.py::test_dropout_is_told_from_other_weights_only_where_prompts_repeat"),
    "every number a bf16 number": (
        "logs.mismatch.find_rounding", "nonzero.to(dtype).double() == nonzero", "nonzero == nonzero",
        "logs/test_mismatch.py::test_noise_is_no_rounding"),
    "lines counted from 0": (
        "logs.reader._records", "enumerate(lines, 1)", "enumerate(lines)",
        "logs/test_reader.py::test_an_error_names_place_and_column_of_a_bad_value"),
    "rows counted from the batch's start": (
        "logs.reader._open_parquet", "range(done, done := done + batch.num_rows)", "range(batch.num_rows)",
        "logs/test_reader.py::test_an_error_names_place_and_column_of_a_bad_value"),
    "all prompts one": (
        "logs.reader.Log._number", "len(known))", "0)",
        "logs/test_reader.py::test_prompts_of_any_kind_are_distinguished"),
}  # fmt: skip
"""Where the fault is, the sound text, the faulty text, and the test that must fail."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", first(FAULTS, 1))
def test_a_fault_is_caught(fault, tmp_path):
    where, sound, faulty, test = FAULTS[fault]
    check_caught(tmp_path, (f"klgrad.{where}", sound, faulty), f"tests/{test}")
