"use strict";
// The parts of a loss in words, as a KLTerm, and as settings of frameworks. The site's build writes WORDS and SETTINGS.
const Sentences = (() => {
  const short = (x) => String(Number(x.toPrecision(4)));
  const isNothing = (parts) => parts.divergence.name === "nothing" && parts.horizon.kind === "none";

  function title({ name, alpha, beta }) {
    const number = alpha !== undefined ? ` (α = ${short(alpha)})` : beta !== undefined ? ` (β = ${short(beta)})` : "";
    return WORDS.divergences[name] + number;
  }

  function termOfSum(part, i) {
    const size = Math.abs(part.weight);
    return `${part.weight < 0 ? "minus " : i ? "plus " : ""}${size === 1 ? "" : `${short(size)} × `}${title(part)}`;
  }

  const flat = (side, edge, pull) =>
    edge === null ? "" : `; ${side} l = ${short(edge)} ${pull ? `a constant pull of ${short(pull)}` : "no pull"}`;

  function divergence({ divergence: d, constant, unit }) {
    const shortens = constant > 0 && unit === "completion-mean";
    if (d.name === "nothing") return WORDS.nothing + (shortens ? WORDS.shortens : "");
    const named = d.name === "other" ? WORDS.other : d.name === "sum" ? d.parts.map(termOfSum).join(" ") : title(d);
    const text = d.weight < 0 ? `climbs the ${named}: the sign is wrong` : named;
    const flats = flat("below", d.flat_below, d.pull_below) + flat("above", d.flat_above, d.pull_above);
    return text + flats + (d.convex || d.weight < 0 ? "" : WORDS.falls);
  }

  function horizon({ horizon: h, past_credit: past }) {
    if (h.kind === "none") return "no: each token's effect on later tokens is left out";
    const by = h.estimate === "other" ? "by an estimate of its own" : `by ${h.estimate}`;
    const reach =
      h.kind === "all" ? `to the end of the completion, ${by}` : `discounted by ${short(h.discount)} a token, ${by}`;
    return reach + (past ? "; earlier tokens are in it too, which only adds noise on fresh samples" : "");
  }

  function boundOf(bound) {
    if (!bound) return "";
    const edges = [bound.low, bound.high].filter((x) => x !== null).map(short);
    return `, ${WORDS.bounds[bound.kind]} at ${edges.join(" and ")}, which adds bias`;
  }

  function samples({ samples: s, divergence: d, horizon: h, constant }) {
    if (s.ratio !== "none") return WORDS.ratios[s.ratio] + boundOf(s.bound);
    const isPlain = h.kind === "none" && d.flat_below === null && d.weight === 1;
    const stale = [isPlain && WORDS.stale[d.name], constant && WORDS.drift[Math.sign(constant)]].filter(Boolean);
    return WORDS.ratios.none + (stale.length ? `; on stale ones ${stale.join(" and ")}` : "");
  }

  function scale(parts) {
    if (isNothing(parts)) return "0: β has no effect";
    if (parts.divided_by_spread) return "depends on the spread: β has no fixed meaning";
    return parts.divergence.scale === null
      ? "jumps at ref: as strong beside it as far away"
      : `${short(parts.divergence.scale)} × β near ref`;
  }

  function rows(parts) {
    const spread = parts.divided_by_spread ? "; divided by the spread of the group" : "";
    const found = [
      ["divergence", divergence(parts)],
      ["looks ahead", horizon(parts)],
      ["samples", samples(parts)],
      ["unit", WORDS.units[parts.unit]],
      ["baseline", WORDS.baselines[parts.baseline] + spread],
      ["scale", scale(parts)],
    ];
    const beside = `a constant of ${short(parts.constant)} on every score: ${WORDS.constant}`;
    return parts.constant && !isNothing(parts) ? [...found, ["beside it", beside]] : found;
  }

  // The same as a KLTerm: code, or the reason why there is none.

  function refusal(parts) {
    const { divergence: d, horizon: h, samples: s } = parts;
    const isFlat = d.flat_below !== null || d.flat_above !== null;
    const reasons = {
      nothing: isNothing(parts),
      constant: parts.constant,
      divergence: !(d.weight > 0) || (isFlat && !isHuber(d)),
      spread: parts.divided_by_spread,
      unit: !["sum", "token-mean"].includes(parts.unit),
      ratio: s.ratio === "other" || (s.ratio === "token" && h.kind !== "none"),
      horizon: h.kind !== "none" && (isFlat || d.name !== "reverse-kl" || !["k1", "k3"].includes(h.estimate)),
    };
    return WORDS.refusals[Object.keys(reasons).find((name) => reasons[name])];
  }

  const isHuber = (d) =>
    d.name === "reverse-kl" && d.weight === 1 && d.flat_below === -d.flat_above && d.pull_above === d.flat_above;

  function nameOf(d) {
    if (d.flat_above !== null) return `huber(${d.flat_above})`;
    const number = d.alpha ?? d.beta;
    return d.name.replace("-kl", "") + (number === undefined ? "" : `(${number})`);
  }

  function weighting({ ratio, bound: b }) {
    const numbers = b && (b.kind === "truncate" ? [b.high] : [b.low ?? 0, b.high]).join(", ");
    const bound = b ? `${b.kind[0].toUpperCase()}${b.kind.slice(1)}(${numbers})` : "None";
    return `weighting=ImportanceWeighting("${ratio}", bound=${bound})`;
  }

  function term(parts) {
    const { divergence: d, horizon: h, samples: s } = parts;
    const why = refusal(parts);
    if (why) return { code: null, why };
    const name = nameOf(d);
    const fields = [
      name !== "reverse" && `divergence="${name}"`,
      h.kind === "none" && 'level="token"',
      name === "forward" && 'estimator="k3"',
      h.estimate === "k3" && 'estimator="k1_k3"',
      h.kind === "discount" && `discount=${h.discount}`,
      parts.baseline !== "none" && 'baseline="leave_one_out"',
      s.ratio !== "none" && weighting(s),
      parts.unit === "token-mean" && 'reduction="token"',
    ];
    const notes = [
      d.weight !== 1 && `with ${short(d.weight)} × β`,
      parts.past_credit && "without the noise of earlier tokens",
      parts.baseline === "group-mean" && "β times 1 - 1/n in groups of n",
    ];
    return { code: `KLTerm(${fields.filter(Boolean).join(", ")})`, why: notes.filter(Boolean).join("; ") };
  }

  // The settings of frameworks that are audited.

  function alike(a, b) {
    if (a === b) return true;
    if (typeof a === "number" && typeof b === "number") return Math.abs(a - b) <= 0.01 * Math.abs(b);
    const areObjects = a && b && typeof a === "object" && typeof b === "object";
    return Boolean(areObjects) && Object.keys({ ...a, ...b }).every((key) => alike(a[key], b[key]));
  }

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
