"""Facts about the report on a log: computed here from the data, and compared with a package that may be faulty."""

import json
from functools import cache

import torch
from logs.synthetic import mask_of, sampled, write


def broken(logs, folder):
    """The facts that do not hold for `logs`, a correct or faulty `klgrad.logs`; an exception counts as one."""
    for fact in (numbers, ratios, coefficients, places, causes):
        try:
            for name, holds in fact(logs, folder):
                if not holds:
                    yield name
        except Exception as error:
            yield f"{fact.__name__}: {type(error).__name__}: {error}"


def close(found, expected):
    return abs(float(found) - float(expected)) <= 1e-5 * max(abs(float(expected)), 1e-2)


def data_with_mask():
    data = sampled("dropout", 0.3, rows=48, tokens=10)
    data = {name: x.double() if x.is_floating_point() else x for name, x in data.items()}
    return data | {"mask": mask_of(data["logp"].shape)}


def numbers(logs, folder):
    data = data_with_mask()
    live, group = data["mask"], data["group"]
    found = logs.examine(write(folder / "log.npz", data), chunk_tokens=100)
    l, d = data["logp"] - data["ref_logp"], data["behavior_logp"] - data["logp"]
    k3 = (torch.exp(-l) - 1 + l)[live]
    totals = torch.stack([(l * live)[group == g].sum() for g in group.unique()])
    counts = torch.stack([live[group == g].sum() for g in group.unique()])
    residual = totals - totals.sum() / counts.sum() * counts
    error = (residual.square().sum() / (1 - (counts / counts.sum()).square().sum())).sqrt() / counts.sum()
    kl = found.kl.metrics()
    del data["group"]
    alone = logs.examine(write(folder / "log.npz", data), chunk_tokens=100).kl.metrics()
    per_completion = (l * live).sum(-1)
    return {
        "tokens": found.tokens == int(live.sum()),
        "k3": close(kl["kl/reverse/k3/per_token"], k3.mean()),
        "k1 per completion": close(kl["kl/reverse/k1/per_sequence"], l[live].sum() / len(live)),
        "clustered error": close(kl["kl/reverse/k1/per_token/standard_error"], error),
        "error": close(
            alone["kl/reverse/k1/per_sequence/standard_error"], per_completion.std() / len(per_completion) ** 0.5
        ),
        "mismatch": close(found.mismatch.metrics()["kl/mismatch/k1/per_token"], d[live].mean()),
    }.items()


def ratios(logs, folder):
    data = data_with_mask()
    live = data["mask"]
    log_ratio = torch.where(live, data["logp"] - data["behavior_logp"], 0)
    prefix, sequence = log_ratio.cumsum(-1).exp()[live], log_ratio.sum(-1).exp()[live.any(-1)]
    kl = logs.examine(write(folder / "log.npz", data), chunk_tokens=100).kl.metrics()
    return {
        "prefix ratio": close(kl["ratio/prefix/mean"], prefix.mean()),
        "quantile": close(kl["ratio/prefix/quantile_0.99"], prefix.quantile(0.99)),
        "effective sample size": close(
            kl["ratio/sequence/effective_sample_size"], sequence.sum() ** 2 / sequence.square().sum() / len(sequence)
        ),
    }.items()


def coefficients(logs, folder):
    logp = torch.full((4, 10), -5.0).double()
    ref = logp - torch.linspace(-1, 1, 10).double()
    ref[:, :3] = -0.5  # log ref/π = 4.5: k3 is beyond a clamp at 10
    path, l = write(folder / "log.npz", {"logp": logp, "ref_logp": ref}), logp - ref
    clamped = torch.where(l < -4, 0, 1 - torch.exp(-l))
    found = logs.examine(path, "k3-loss-clamped")
    to_go = l.flip(-1).cumsum(-1).flip(-1)
    return {
        "token level": close(found.comparisons["token"].relative_difference, (clamped - l).norm() / l.norm()),
        "sequence level": close(
            found.comparisons["sequence"].relative_difference, (clamped - to_go).norm() / to_go.norm()
        ),
        "multiple": close(found.comparisons["token"].scale, (clamped * l).sum() / l.square().sum()),
        "dead zone": close(found.dead_share, 0.3),
    }.items()


FAULTS = {
    "temperature": ("temperature", 0.8),
    "filter": ("top-p", 0.9),
    "shift": ("shift", 0),
    "rounding": ("bf16", 0),
    "random trainer": ("dropout", 0.3),
    "systematic": ("stale", 0.3),
    "none": ("clean", 0),
}


@cache
def faulty(name):
    return sampled(*FAULTS[name])


def causes(logs, folder):
    for name in FAULTS:
        cause = logs.examine(write(folder / "log.npz", faulty(name))).cause
        yield f"cause {name}, alone", (cause.name, cause.alone) == (name, True)
        if name == "temperature":
            yield "its size", abs(cause.statistics["temperature_ratio"] - 0.8) < 0.02
        if name == "shift":
            yield "its direction", "of the next one" in cause.description
    for shape, t in (("flat", 1.5), ("language", 0.5)):  # by the mean ratio, and by the limits
        data = sampled("temperature", t, rows=104, shape=shape)
        del data["group"]
        cause = logs.examine(write(folder / "log.npz", data)).cause
        yield f"a temperature without groups, {shape}", cause.name == "temperature"
        low, high = (cause.statistics[f"temperature_ratio/{end}"] for end in ("low", "high"))
        yield f"its range, {shape}", low * 0.98 <= t <= high * 1.02 < 4 * low
    wobble = 0.002 * torch.randn(faulty("none")["logp"].shape, generator=torch.Generator().manual_seed(0))
    noisy = faulty("none") | {"logp": (faulty("none")["logp"] + wobble).clamp(max=0)}
    yield "noise is no rounding", logs.examine(write(folder / "log.npz", noisy)).cause.name == "random trainer"


def places(logs, folder):
    data = data_with_mask()
    row, token = 33, 5
    data["mask"][row] = True
    data["mask"][row, 3] = False
    data["ref_logp"][row, token] = 0.5
    found = {}
    for suffix in (".npz", ".parquet", ".jsonl"):
        text = message(logs, write(folder / f"log{suffix}", data), chunk_tokens=60)
        place = f"line {row + 1}" if suffix == ".jsonl" else f"row {row}"
        found[f"place in {suffix}"] = (
            f"`ref_logp` finite and <= 0 at every live token; received 0.5 at {place}, token 5;" in text
        )
    path = folder / "log.jsonl"
    path.write_text('{"logp": [-1], "ref_logp": [-1]}\n' * 3 + '\n{"logp": [-1], "ref_logp": [-1, -1]}\n')
    found["place of a short row"] = "2 and 1 in line 5" in message(logs, path)
    path.write_text(json.dumps({"logp": [-1], "ref_logp": [-1]}) + '\n{"logp": [-1')
    found["place of a cut"] = "line 2 of" in message(logs, path)
    return found.items()


def message(logs, path, **options):
    try:
        logs.examine(path, **options)
    except logs.LogError as error:
        return str(error)
    return ""
