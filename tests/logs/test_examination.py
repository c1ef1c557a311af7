"""The streamed numbers are those of `klgrad.reports` on one batch, in every format and for every chunk size."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings, strategies as st
from logs.synthetic import WRITERS, lists, mask_of, sampled, write
from strategies import rollouts
from tolerances import EXACT, SINGLE

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate, kl_report, mismatch_report, zoo as cells
from klgrad.core.result import StreamSample
from klgrad.logs import LogError, examine, reader
from klgrad.logs.examination import cell_of, coefficients
from klgrad.reports import KLSums, MismatchSums


def same(found, expected, tolerance):
    assert set(found) == set(expected)
    for name, value in expected.items():
        if value != value:
            assert found[name] != found[name], name
        else:
            tolerance.check(found[name], value)


def float64(**given):
    data = {name: x.double() if x.is_floating_point() else x for name, x in sampled("dropout", 0.3, **given).items()}
    return data | {"mask": mask_of(data["logp"].shape)}


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("chunk_tokens", [90, 10**6])
def test_the_report_is_that_of_one_batch(suffix, chunk_tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "BATCH_CELLS", 200)
    monkeypatch.setattr(reader, "DECODED_ROWS", 7)
    data = float64(rows=40, tokens=12)
    if suffix == ".jsonl":  # read as float32
        data = {k: x.float() if x.is_floating_point() else x for k, x in data.items()}
    found = examine(write(tmp_path / f"log{suffix}", data), chunk_tokens=chunk_tokens)
    wide = {k: x.double() if x.is_floating_point() else x for k, x in data.items()}
    tolerance = SINGLE if suffix == ".jsonl" else EXACT
    same(found.kl.metrics(), kl_report(Rollout(**wide)).metrics(), tolerance)
    expected = mismatch_report(wide["logp"], wide["behavior_logp"], wide["mask"], group=wide["group"]).metrics()
    assert found.mismatch is not None
    same(found.mismatch.metrics(), expected, tolerance)
    assert (found.rows, found.tokens) == (40, int(data["mask"].sum()))


def test_ragged_lists_are_rectangles_with_a_mask(tmp_path):
    data = float64(rows=20, tokens=9)
    mask = data.pop("mask")
    ragged = {
        name: [row[live].tolist() for row, live in zip(x, mask, strict=True)] if x.ndim == 2 else x.tolist()
        for name, x in data.items()
    }
    pq.write_table(pa.table(ragged), tmp_path / "log.parquet", row_group_size=7)
    found = examine(tmp_path / "log.parquet")
    same(found.kl.metrics(), kl_report(Rollout(**data, mask=mask)).metrics(), EXACT)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_any_batches_add_up_to_the_whole(data):
    whole = data.draw(rollouts(gradient=False))
    grouped = data.draw(st.booleans())
    cut = data.draw(st.integers(1, len(whole.logp) - 1))
    kl, mismatch = KLSums(), MismatchSums()
    for rows in (slice(None, cut), slice(cut, None)):
        names = ("logp", "ref_logp", "mask", "behavior_logp")
        part = Rollout(**{name: getattr(whole, name)[rows] for name in names})
        group = whole.group[rows] if grouped else None
        kl.add(part, group)
        mismatch.add(Rollout(part.logp, part.behavior_logp, part.mask, behavior_logp=part.behavior_logp), group)
    expected = kl_report(
        Rollout(whole.logp, whole.ref_logp, whole.mask, whole.behavior_logp, whole.group if grouped else None)
    )
    same(kl.report().metrics(), expected.metrics(), EXACT)
    expected = mismatch_report(
        whole.logp, whole.behavior_logp, whole.mask, group=whole.group if grouped else None
    ).metrics()
    same(mismatch.report().metrics(), expected, EXACT)


def test_errors_do_not_cancel_away():
    """Identical completions have a standard error of 0, however large their KL is."""
    sums = KLSums()
    for _ in range(2):
        sums.add(Rollout(-torch.ones(4, 5).double(), -torch.full((4, 5), 1001.0).double(), torch.ones(4, 5)), None)
    EXACT.check(sums.report().estimates["kl/reverse/k1/per_token"].standard_error, 0.0)


def test_old_logp_is_the_trainer_and_the_sampler_where_it_is_alone(tmp_path):
    data = float64(rows=24, tokens=8)
    behavior = data.pop("behavior_logp")
    alone = examine(write(tmp_path / "a.npz", data | {"old_logp": behavior}))
    assert alone.mismatch is None
    assert "π/old" in alone.notes[0]
    same(alone.kl.metrics(), kl_report(Rollout(**data, behavior_logp=behavior)).metrics(), EXACT)
    both = examine(write(tmp_path / "b.npz", data | {"old_logp": data["ref_logp"], "behavior_logp": behavior}))
    expected = mismatch_report(data["ref_logp"], behavior, data["mask"], group=data["group"]).metrics()
    assert both.mismatch is not None
    EXACT.check(both.mismatch.metrics()["kl/mismatch/k3/per_token"], expected["kl/mismatch/k3/per_token"])


def test_a_file_with_old_logp_only_is_the_start_of_an_update(tmp_path):
    data = float64(rows=24, tokens=8)
    verl = {"old_log_probs": data["logp"], "ref_log_prob": data["ref_logp"], "response_mask": data["mask"]}
    found = examine(write(tmp_path / "log.npz", verl | {"rollout_log_probs": data["behavior_logp"]}))
    assert found.columns["logp"] == "old_log_probs"
    assert "`old_log_probs` is used as logp" in found.notes[0]
    expected = kl_report(Rollout(data["logp"], data["ref_logp"], data["mask"], behavior_logp=data["behavior_logp"]))
    same(found.kl.metrics(), expected.metrics(), EXACT)


@pytest.mark.parametrize("cell", ["k3-loss", "k2-loss", "k3-loss-clamped", "k1-loss", "k3-no-grad", "k1-reward"])
def test_coefficients_are_compared_as_on_one_batch(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "BATCH_CELLS", 60)
    data = float64(rows=30, tokens=7)
    data["ref_logp"] = (data["ref_logp"] * 3).clamp(min=-12)
    del data["group"]
    found = examine(write(tmp_path / "log.npz", data), cell)
    rollout = Rollout(**{**data, "logp": data["logp"].clone().requires_grad_()})
    live = rollout.mask
    c = coefficients(cell_of(cell), rollout)[live]
    token = KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None))
    sequence = KLTerm(weighting=ImportanceWeighting("prefix", bound=Truncate(2.0)))
    for level, term in (("token", token), ("sequence", sequence)):
        s = term(rollout).coefficient[live]
        against = found.comparisons[level]
        EXACT.check(against.relative_difference, float((c - s).norm() / s.norm()))
        EXACT.check(against.scale, float(c @ s / (s @ s)))
        if cell in ("k1-loss", "k3-no-grad"):
            assert against.correlation != against.correlation
        else:
            EXACT.check(against.correlation, float(torch.corrcoef(torch.stack([c, s]))[0, 1]))
    if cell == "k3-no-grad":
        assert found.dead_share > 0.5


def test_a_clamped_cell_has_its_dead_zone_counted(tmp_path):
    logp = torch.full((4, 10), -5.0)
    ref = logp.clone()
    ref[:, :3] = -0.5  # log ref/π = 4.5: k3 is beyond its clamp
    found = examine(write(tmp_path / "log.npz", {"logp": logp, "ref_logp": ref}), "k3-loss-clamped")
    SINGLE.check(found.dead_share, 0.3)
    assert "and are zero on 30.00% of the tokens" in found.advice[0]


def test_every_cell_is_taken_or_refused():
    refused = set()
    for name in cells.CELLS:
        try:
            cell_of(name)
        except LogError:
            refused.add(name)
    groups = {"k1-reward-group-mean", "k1-reward-group-std"}
    groups |= {f"{name}-leave-one-out" for name in ("k1-reward", "k3-reward", "k3-both")}
    assert refused == groups | {"k2-loss-token-mean", "k1-token-mean-discounted"}


def test_thinned_quantiles_are_near(tmp_path, monkeypatch):
    data = float64(rows=200, tokens=20)
    exact = kl_report(Rollout(**data)).metrics()
    monkeypatch.setattr(StreamSample.__init__, "__defaults__", (1000,))
    found = examine(write(tmp_path / "log.npz", data)).kl.metrics()
    assert found["ratio/token/quantile_0.5"] != exact["ratio/token/quantile_0.5"]
    for q in ("0.01", "0.5", "0.99"):
        assert abs(found[f"ratio/token/quantile_{q}"] - exact[f"ratio/token/quantile_{q}"]) < 0.1


def test_padding_without_a_mask_is_noticed(tmp_path):
    data = sampled(rows=20, tokens=8)
    for name in ("logp", "ref_logp", "behavior_logp"):
        data[name][5:, 6:] = 0
    assert "75% of the rows end in log-probs of exactly 0" in examine(write(tmp_path / "log.npz", data)).notes[0]
    assert lists(data)["logp"][6][7] == 0
