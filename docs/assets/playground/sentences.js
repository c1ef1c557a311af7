"use strict";
// The parts of a loss in words, as a KLTerm, and as settings of frameworks.
const Sentences = (() => {
  const TITLES = {
    "reverse-kl": "reverse KL, KL(π‖ref)",
    "forward-kl": "forward KL, KL(ref‖π)",
    "chi-square": "half of χ²(π‖ref)",
    hellinger: "squared Hellinger distance",
    "total-variation": "twice the total variation distance",
    "jensen-shannon": "Jensen-Shannon divergence",
    alpha: "α-divergence",
  };
  const short = (x) => String(Number(x.toPrecision(4)));
  const title = (d) =>
    TITLES[d.name] +
    (d.alpha !== undefined ? ` (α = ${short(d.alpha)})` : d.beta !== undefined ? ` (β = ${short(d.beta)})` : "");
  const isNothing = (parts) => parts.divergence.name === "nothing" && parts.horizon.kind === "none";

  function divergence({ divergence: d, constant, unit }) {
    const lowers =
      constant > 0 && unit === "completion-mean" ? "; it lowers E[1/length], which asks for longer completions" : "";
    const names = { nothing: `nothing: ref has no effect${lowers}`, other: "one of its own, with the f(u) below" };
    let text = names[d.name];
    if (d.name === "sum")
      text = d.parts
        .map(
          (p, i) =>
            `${p.weight < 0 ? "minus " : i ? "plus " : ""}${Math.abs(p.weight) === 1 ? "" : `${short(Math.abs(p.weight))} × `}${title(p)}`,
        )
        .join(" ");
    if (text === undefined) text = d.weight < 0 ? `climbs the ${title(d)}: the sign is wrong` : title(d);
    const ends = [
      ["below", d.flat_below, d.pull_below],
      ["above", d.flat_above, d.pull_above],
    ].filter(([, edge]) => edge !== null);
    const flats = ends.map(
      ([side, edge, pull]) =>
        `; ${side} l = ${short(edge)} ${pull === 0 ? "no pull" : `a constant pull of ${short(pull)}`}`,
    );
    return (
      text +
      flats.join("") +
      (d.convex || d.name === "nothing" || d.weight < 0
        ? ""
        : ". Not convex: somewhere it pushes away from ref, or stops pulling")
    );
  }

  function horizon({ horizon: h, past_credit: past }) {
    if (h.kind === "none") return "no: each token's effect on later tokens is left out";
    const by = h.estimate === "other" ? "by an estimate of its own" : `by ${h.estimate}`;
    const reach =
      h.kind === "all" ? `to the end of the completion, ${by}` : `discounted by ${short(h.discount)} a token, ${by}`;
    return reach + (past ? "; earlier tokens are in it too, which only adds noise on fresh samples" : "");
  }

  const boundOf = (b) =>
    b
      ? `, ${{ truncate: "truncated", clip: "clipped", mask: "masked" }[b.kind]} at ${[b.low, b.high]
          .filter((x) => x !== null)
          .map(short)
          .join(" and ")}, which adds bias`
      : "";

  function samples(parts) {
    const { samples: s, divergence: d, constant } = parts;
    const drift =
      constant > 0 ? "it climbs KL(μ‖π), away from what was sampled" : constant < 0 ? "it descends KL(μ‖π)" : "";
    const own = {
      "reverse-kl": "it descends the mean of l²/2 under μ",
      "forward-kl": "it descends the mean of k3(l) under μ",
    }[d.name];
    const stale = [parts.horizon.kind === "none" && d.flat_below === null && d.weight === 1 ? own : "", drift]
      .filter(Boolean)
      .join(" and ");
    return {
      none: `fresh ones only: no importance ratio${stale ? `; on stale ones ${stale}` : ""}`,
      token: `stale ones on the sampler's prefixes: the ratio of the token itself${boundOf(s.bound)}`,
      prefix: `stale ones too: the ratio of the tokens so far${boundOf(s.bound)}`,
      sequence: `stale ones too: the ratio of the whole completion${boundOf(s.bound)}`,
      other: "fresh ones only: how it depends on π/μ is no importance weight",
    }[s.ratio];
  }

  const UNITS = {
    sum: "summed over the completion, averaged over completions",
    "completion-mean": "mean over each completion's tokens: tokens of short completions weigh more",
    "token-mean": "mean over all tokens of the batch: micro-batches of other sizes change it",
    "fixed-length": "summed over the completion and divided by the padded length",
  };
  const BASELINES = {
    none: "none",
    "leave-one-out": "the mean of the other completions of the group",
    "group-mean": "the mean of the group, itself included: 1 - 1/n of the scale is left",
  };

  function scale(parts) {
    if (isNothing(parts)) return "0: β has no effect";
    if (parts.divided_by_spread) return "depends on the spread: β has no fixed meaning";
    return parts.divergence.scale === null
      ? "jumps at ref: as strong beside it as far away"
      : `${short(parts.divergence.scale)} × β near ref`;
  }

  const rows = (parts) => [
    ["divergence", divergence(parts)],
    ["looks ahead", horizon(parts)],
    ["samples", samples(parts)],
    ["unit", UNITS[parts.unit]],
    ["baseline", BASELINES[parts.baseline] + (parts.divided_by_spread ? "; divided by the spread of the group" : "")],
    ["scale", scale(parts)],
    ...(parts.constant && !isNothing(parts)
      ? [
          [
            "beside it",
            `a constant of ${short(parts.constant)} on every score: nothing on fresh samples, a drift on stale ones`,
          ],
        ]
      : []),
  ];

  // The same as a KLTerm: code, or the reason why there is none.

  function term(parts) {
    const { divergence: d, horizon: h, samples: s } = parts;
    const no = (why) => ({ code: null, why });
    if (isNothing(parts)) return no("It means nothing, so there is no term for it.");
    if (parts.constant) return no("No term has a constant on the score.");
    if (d.name === "sum" || d.name === "other" || d.flat_below !== null || d.flat_above !== null || !(d.weight > 0))
      return no("No term has this divergence: klgrad.divergences.from_slope makes one of a slope that rises.");
    if (parts.divided_by_spread) return no("A term is not divided by a spread: β would lose its meaning.");
    if (!["sum", "token-mean"].includes(parts.unit))
      return no("A term is summed over the completion, or averaged over the batch's tokens.");
    if (s.ratio === "other" || (s.ratio === "token" && h.kind !== "none"))
      return no("A term that looks ahead takes the ratio of a prefix or of the completion.");
    if (h.kind !== "none" && (d.name !== "reverse-kl" || !["k1", "k3"].includes(h.estimate)))
      return no("A term looks ahead by an estimate of its own divergence.");
    const number = d.alpha ?? d.beta;
    const name = d.name.replace("-kl", "") + (number === undefined ? "" : `(${number})`);
    const fields = [];
    if (name !== "reverse") fields.push(`divergence="${name}"`);
    if (h.kind === "none") fields.push('level="token"');
    if (name === "forward") fields.push('estimator="k3"');
    if (h.estimate === "k3") fields.push('estimator="k1_k3"');
    if (h.kind === "discount") fields.push(`discount=${h.discount}`);
    if (parts.baseline !== "none") fields.push('baseline="leave_one_out"');
    if (s.ratio !== "none") {
      const b = s.bound;
      const bound = b
        ? `${{ truncate: "Truncate", clip: "Clip", mask: "Mask" }[b.kind]}(${b.kind === "truncate" ? b.high : `${b.low ?? 0}, ${b.high}`})`
        : "None";
      fields.push(`weighting=ImportanceWeighting("${s.ratio}", bound=${bound})`);
    }
    if (parts.unit === "token-mean") fields.push('reduction="token"');
    const why = [
      d.weight === 1 ? "" : `with ${short(d.weight)} × β`,
      parts.past_credit ? "without the noise of earlier tokens" : "",
    ];
    if (parts.baseline === "group-mean") why.push("β times 1 - 1/n in groups of n");
    return { code: `KLTerm(${fields.join(", ")})`, why: why.filter(Boolean).join("; ") };
  }

  // The settings of frameworks that are audited, each with the choice that it is: SETTINGS, which the site's build writes.

  const close = (a, b) =>
    a === b || (typeof a === "number" && typeof b === "number" && Math.abs(a - b) <= 0.01 * Math.abs(b));
  const alike = (a, b) =>
    close(a, b) ||
    (a &&
      b &&
      typeof a === "object" &&
      typeof b === "object" &&
      Object.keys({ ...a, ...b }).every((k) => alike(a[k], b[k])));

  function differences(a, b, inReward) {
    const pairs = {
      divergence: [a.divergence, b.divergence].map((d) => [d.name, d.weight, d.alpha, d.beta, d.parts]),
      "where it is flat": [a.divergence, b.divergence].map((d) => [d.flat_below, d.flat_above]),
      "looks ahead": [
        [a.horizon, a.past_credit],
        [b.horizon, b.past_credit],
      ],
      samples: inReward ? [0, 0] : [a.samples, b.samples],
      unit: [a.unit, b.unit],
      baseline: [
        [a.baseline, a.divided_by_spread],
        [b.baseline, b.divided_by_spread],
      ],
      constant: [a.constant, b.constant],
    };
    return Object.keys(pairs).filter((key) => !alike(...pairs[key]));
  }

  let known = null; // the parts of every setting: read once

  // By framework, the setting that is this choice, or the nearest one that has its divergence and looks as far ahead.
  function settings(parts, state, takeApart, defaults) {
    known ??= SETTINGS.map((entry) => ({ ...entry, parts: takeApart({ ...defaults, ...entry.choice }) }));
    return ["TRL", "verl", "OpenRLHF"].map((framework) => {
      const found = known
        .filter((entry) => entry.framework === framework)
        .map((entry) => ({
          ...entry,
          differs: differences(parts, entry.parts, state.place !== "loss" && entry.choice.place === "reward"),
        }))
        .filter((entry) => !entry.differs.includes("divergence") && !entry.differs.includes("looks ahead"))
        .sort((a, b) => a.differs.length - b.differs.length)[0];
      return { framework, ...(found || { lines: null, differs: [] }) };
    });
  }

  return { rows, term, settings };
})();
