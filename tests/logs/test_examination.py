"""The report on a log: its numbers, in every format and for every chunk size, what it says and what it draws."""

import json
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from logs.synthetic import WRITERS, mask_of, sampled, write
from tolerances import EXACT, SINGLE
from typer.testing import CliRunner

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate, kl_report, mismatch_report, zoo as cells
from klgrad.cli import app
from klgrad.errors import KlgradError
from klgrad.logs import LogError, examination, examine, reader
from klgrad.logs.coefficients import cell_of, coefficients
from klgrad.logs.examination import FIGURES, draw


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
@pytest.mark.parametrize("rows", [7, 1000])
def test_the_report_is_that_of_one_batch(suffix, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(examination, "BATCH_CELLS", 200)
    monkeypatch.setattr(reader, "ROWS", rows)
    data = float64(rows=40, tokens=12)
    if suffix == ".jsonl":  # read as float32
        data = {k: x.float() if x.is_floating_point() else x for k, x in data.items()}
    found = examine(write(tmp_path / f"log{suffix}", data))
    wide = {k: x.double() if x.is_floating_point() else x for k, x in data.items()}
    tolerance = SINGLE if suffix == ".jsonl" else EXACT
    same(found.kl.metrics(), kl_report(Rollout(**wide)).metrics(), tolerance)
    expected = mismatch_report(wide["logp"], wide["behavior_logp"], wide["mask"], group=wide["group"]).metrics()
    assert found.mismatch is not None
    same(found.mismatch.metrics(), expected, tolerance)
    assert (found.rows, found.tokens) == (40, int(data["mask"].sum()))


def test_the_numbers_are_those_of_their_definitions(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "ROWS", 10)
    data = float64(rows=48, tokens=10)
    live, group = data["mask"], data["group"]
    found = examine(write(tmp_path / "log.npz", data))
    log_ratio, away = data["logp"] - data["ref_logp"], data["behavior_logp"] - data["logp"]
    totals = torch.stack([(log_ratio * live)[group == g].sum() for g in group.unique()])
    counts = torch.stack([live[group == g].sum() for g in group.unique()])
    residual = totals - totals.sum() / counts.sum() * counts
    error = (residual.square().sum() / (1 - (counts / counts.sum()).square().sum())).sqrt() / counts.sum()
    step = torch.where(live, -away, 0)
    prefix, sequence = step.cumsum(-1).exp()[live], step.sum(-1).exp()[live.any(-1)]
    expected = {
        "kl/reverse/k3/per_token": (torch.exp(-log_ratio) - 1 + log_ratio)[live].mean(),
        "kl/reverse/k1/per_sequence": log_ratio[live].sum() / len(live),
        "kl/reverse/k1/per_token/standard_error": error,
        "ratio/prefix/mean": prefix.mean(),
        "ratio/prefix/quantile_0.99": prefix.quantile(0.99),
        "ratio/sequence/effective_sample_size": sequence.sum() ** 2 / sequence.square().sum() / len(sequence),
    }
    for name, value in expected.items():
        SINGLE.check(found.kl.metrics()[name], float(value))
    assert found.mismatch is not None
    SINGLE.check(found.mismatch.metrics()["kl/mismatch/k1/per_token"], float(away[live].mean()))


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
    monkeypatch.setattr(examination, "BATCH_CELLS", 60)
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
        against = found.coefficients.levels[level]
        EXACT.check(against.relative_difference, float((c - s).norm() / s.norm()))
        EXACT.check(against.scale, float(c @ s / (s @ s)))
        if cell in ("k1-loss", "k3-no-grad"):
            assert against.correlation != against.correlation
        else:
            EXACT.check(against.correlation, float(torch.corrcoef(torch.stack([c, s]))[0, 1]))
    if cell == "k3-no-grad":
        assert found.coefficients.dead_share > 0.5


def test_a_clamped_cell_has_its_dead_zone_counted(tmp_path):
    logp = torch.full((4, 10), -5.0)
    ref = logp.clone()
    ref[:, :3] = -0.5  # log ref/π = 4.5: k3 is beyond its clamp
    found = examine(write(tmp_path / "log.npz", {"logp": logp, "ref_logp": ref}), "k3-loss-clamped")
    SINGLE.check(found.coefficients.dead_share, 0.3)
    assert "and are zero on 30.00% of the tokens" in found.advice[0]


def test_every_cell_is_taken_or_refused(tmp_path):
    refused = set()
    for name in cells.CELLS:
        try:
            cell_of(name)
        except LogError:
            refused.add(name)
    groups = {"k1-reward-group-mean", "k1-reward-group-std"}
    groups |= {f"{name}-leave-one-out" for name in ("k1-reward", "k3-reward", "k3-both")}
    assert refused == groups | {"k2-loss-token-mean", "k1-token-mean-discounted"}
    path = write(tmp_path / "log.npz", sampled(rows=4, tokens=3))
    for cell, text in {"k3-los": "did you mean 'k3-loss'", "k2-loss-token-mean": "needs the whole batch"}.items():
        with pytest.raises(KlgradError, match=text):
            examine(path, cell)


def test_padding_without_a_mask_is_noticed(tmp_path):
    data = sampled(rows=20, tokens=8)
    for name in ("logp", "ref_logp", "behavior_logp"):
        data[name][5:, 6:] = 0
    assert "75% of the rows end in log-probs of exactly 0" in examine(write(tmp_path / "log.npz", data)).notes[0]


# The report requests no column that it has, proposes no weight that is 1, and explains large numbers.


def report(tmp_path, data, *cell):
    return examine(write(tmp_path / "log.npz", data), *cell)


@pytest.mark.parametrize(
    ("behavior", "term"),
    [
        (lambda x, _: x, "KLTerm(level='token')"),
        (lambda x, noise: (x + 1e-5 * noise).clamp(max=0), "KLTerm(level='token')"),
        (lambda x, noise: x - noise.abs(), "KLTerm(level='token', weighting=ImportanceWeighting('token', bound=None))"),
        # All completions have one weight: the effective sample size is 100%, but the ratio is not 1.
        (lambda x, _: x - 0.1, "KLTerm(level='token', weighting=ImportanceWeighting('token', bound=None))"),
    ],
)
def test_a_weight_is_proposed_only_if_the_sampler_is_another_policy(behavior, term, tmp_path):
    data = sampled(rows=64, tokens=20)
    noise = torch.randn(data["logp"].shape, generator=torch.Generator().manual_seed(0))
    data["behavior_logp"] = behavior(data["logp"], noise)
    assert report(tmp_path, data, "k3-loss").coefficients.levels["token"].term == term


def test_a_loss_of_single_tokens_is_explained_against_whole_completions(tmp_path):
    data = sampled(rows=64, tokens=20)
    found = report(tmp_path, data, "k2-loss")
    assert found.coefficients.levels["token"].relative_difference < 1e-6
    assert found.coefficients.levels["sequence"].relative_difference > 0.5
    assert "compare such a loss token by token" in found.coefficients.explanation
    shown = CliRunner().invoke(app, ["logs", str(tmp_path / "log.npz"), "--cell", "k2-loss"]).stdout
    assert " ".join(found.coefficients.explanation.split()) in " ".join(shown.split())
    assert report(tmp_path, data, "k1-reward").coefficients.explanation == ""


@pytest.mark.parametrize(("dead", "mention"), [(1, ""), (30, ", and are zero on 0.03% of the tokens")])
def test_a_tiny_dead_zone_is_not_mentioned(dead, mention, tmp_path):
    logp = torch.full((100, 1000), -5.0)
    ref = logp - torch.linspace(-1, 1, 1000)
    ref.view(-1)[:dead] = -0.5  # log ref/π = 4.5: k3 is beyond its clamp
    (advice,) = report(tmp_path, {"logp": logp, "ref_logp": ref}, "k3-loss-clamped").advice
    assert f"%{mention}. Use" in advice
    assert "0.00%" not in advice


def test_without_a_cell_nothing_is_said_of_coefficients(tmp_path):
    data = sampled(rows=12, tokens=20)
    unnamed, named = report(tmp_path, data), report(tmp_path, data, "k3-loss")
    assert unnamed.coefficients is None
    assert unnamed.advice == ["Nothing to change: no fault was found in these data."]
    assert set(named.to_dict()) - set(unnamed.to_dict()) == {"cell"}
    assert named.advice[0].startswith("k3-loss descends ")


# Folders, patterns, reports by a column, and the page.


STEPS = {1: "clean", 10: "temperature"}


def run_of(folder, suffix=".parquet", **changes):
    """Two files of 16 rows, one per step; they have the same prompts."""
    folder.mkdir(exist_ok=True)
    found = {}
    for step, fault in STEPS.items():
        data = sampled(fault, 0.8, rows=16, tokens=6, seed=step)
        found[step] = {**data, "step": torch.full((16,), step), **changes}
        write(folder / f"step-{step:03d}{suffix}", found[step])
    return found


def both(found):
    return {name: torch.cat([x[name] for x in found.values()]) for name in found[1]}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".npz"])
def test_a_folder_is_one_log(suffix, tmp_path):
    found = run_of(tmp_path / "run", suffix)
    (tmp_path / "run" / "notes.txt").write_text("no log")
    whole = examine(write(tmp_path / f"whole{suffix}", both(found)))
    for paths in (tmp_path / "run", tmp_path / "run" / f"*{suffix}", sorted((tmp_path / "run").glob(f"*{suffix}"))):
        report = examine(paths)
        assert (report.rows, report.tokens, report.kl.clusters) == (32, 192, whole.kl.clusters)
        for name, value in whole.kl.metrics().items():
            EXACT.check(report.kl.metrics()[name], value)
        assert report.cause == whole.cause


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("one_file", [False, True])
@pytest.mark.parametrize("old", [False, True])
def test_by_step(suffix, one_file, old, tmp_path):
    """Each part is the report on its own rows, also where blocks mix the rows of several steps.

    With an old policy the ratios of the mismatch are others than those of the KL.
    """
    changes = {"old_logp": sampled(rows=16, tokens=6)["ref_logp"]} if old else {}
    found = run_of(tmp_path / "run", suffix, **changes)
    path = write(tmp_path / f"whole{suffix}", both(found)) if one_file else tmp_path / "run"
    report = examine(path, by="step")
    assert [(part.label, part.rows, part.tokens) for part in report.parts] == [(1, 16, 96), (10, 16, 96)]
    for part in report.parts:
        alone = examine(tmp_path / "run" / f"step-{part.label:03d}{suffix}")
        for own, expected in ((part.kl, alone.kl), (part.mismatch, alone.mismatch)):
            same(own.metrics(), expected.metrics(), EXACT)


def test_other_columns_and_errors_name_the_file_and_too_many_values_are_refused(tmp_path, monkeypatch):
    found = run_of(tmp_path / "run")
    with pytest.raises(LogError, match=r"a column 'stepp' for `by`.*did you mean 'step'"):
        examine(tmp_path / "run", by="stepp")
    monkeypatch.setattr("klgrad.logs.examination.MOST_LABELS", 1)
    with pytest.raises(LogError, match="at most 1 different values in `step`"):
        examine(tmp_path / "run", by="step")
    bad = {**found[10], "logp": found[10]["logp"].clone()}
    bad["logp"][3, 2] = 1.0
    write(tmp_path / "run" / "step-010.parquet", bad)
    with pytest.raises(LogError, match=r"1 at row 3, token 2 of .*step-010\.parquet"):
        examine(tmp_path / "run")
    write(tmp_path / "run" / "step-010.parquet", {name: x for name, x in bad.items() if name != "behavior_logp"})
    with pytest.raises(LogError, match=r"in all files, as in .*step-001\.parquet"):
        examine(tmp_path / "run")


def test_the_command_prints_the_table_and_writes_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    run_of(tmp_path / "<run>")
    page, out = tmp_path / "page.html", tmp_path / "report.json"
    given = ["logs", str(tmp_path / "<run>"), "--by", "step", "--html", str(page), "--json", str(out)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "(2 files): 32 completions, 192 tokens" in result.output
    assert re.search(r"By step\nstep +completions.*\n1 +16 +6 .*\n10 +16 +6 ", result.output)
    text = page.read_text()
    assert text.count("<svg") == text.count("</svg>") == 1
    assert "<run>" not in text  # escaped
    assert "&lt;run&gt;" in text
    assert not re.search(r'(src|href)="?http|<script|<link', text)  # it needs no network
    for words in ("KL to the reference", "What to change", "Trainer against sampler", "By step"):
        assert words in text
    report = json.loads(out.read_text())
    assert [part["report"]["kl/reverse/k3/per_token"] > 0 for part in report["by"]] == [True, True]


def test_the_figure_has_every_quantity_at_every_step(tmp_path, monkeypatch):
    kind = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(kind, "savefig", lambda figure, file, **_: drawn.append(figure) or file.write(b"<svg></svg>"))
    run_of(tmp_path / "run")
    found = examine(tmp_path / "run", by="step")
    assert draw(found) == "<svg></svg>"
    assert [panel.get_title("left") for panel in drawn[0].axes] == list(FIGURES)
    for panel, name in zip(drawn[0].axes, FIGURES.values(), strict=True):
        (line, *_), rows = panel.lines, [{**(part.mismatch or {}), **part.kl} for part in found.parts]
        assert line.get_xydata().tolist() == [[step, row[name]] for step, row in zip(STEPS, rows, strict=True)]
    assert drawn[0].axes[0].lines[2].get_ydata().tolist() == list(found.parts[0].kl.intervals()[FIGURES[K3]])
    assert draw(replace(found, parts=found.parts[:1])) == ""


K3 = "KL(π‖ref) by k3, nats per token"
