"use strict";
// The mathematics of the playground. l is log pi/ref of a token, r is pi/mu, its ratio to the sampler. A loss of l and r is
// computed together with its derivative by log pi of the token, as pairs [value, derivative].
// tests/docs/test_playground.py compares all of it with klgrad's own numbers.
const Mathematics = (() => {
  // A formula becomes a function of (l, r).

  const constant = (x) => [x, 0];
  const chain = (value, slope) => (a) => [value(a[0]), a[1] && slope(a[0]) * a[1]];
  const expm1MinusX = (x) =>
    Math.abs(x) < 0.03 ? x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720)))) : Math.expm1(x) - x;
  const k3 = (l) => expm1MinusX(-l);
  const k3Slope = (l) => -Math.expm1(-l);
  const pick = (a, b, first) => (a[0] === b[0] ? [a[0], (a[1] + b[1]) / 2] : first ? a : b); // as torch does at a tie
  const least = (a, b) => pick(a, b, a[0] < b[0]);
  const most = (a, b) => pick(a, b, a[0] > b[0]);
  const FUNCTIONS = {
    exp: chain(Math.exp, Math.exp),
    log: chain(Math.log, (x) => 1 / x),
    abs: chain(Math.abs, Math.sign),
    sign: chain(Math.sign, () => 0),
    k1: (a) => a,
    k2: chain(
      (l) => (l * l) / 2,
      (l) => l,
    ),
    k3: chain(k3, k3Slope),
    stop: (a) => constant(a[0]),
    min: least,
    max: most,
    clamp: (a, low, high) => (a[0] < low[0] ? low : a[0] > high[0] ? high : a),
  };
  const OPERATIONS = {
    "+": (a, b) => [a[0] + b[0], a[1] + b[1]],
    "-": (a, b) => [a[0] - b[0], a[1] - b[1]],
    "*": (a, b) => [a[0] * b[0], a[1] * b[0] + a[0] * b[1]],
    "/": (a, b) => [a[0] / b[0], (a[1] - (a[0] / b[0]) * b[1]) / b[0]],
    "^": (a, b) => {
      const value = a[0] ** b[0];
      return [value, (a[1] && b[0] * a[0] ** (b[0] - 1) * a[1]) + (b[1] && value * Math.log(a[0]) * b[1])];
    },
  };

  function parse(text) {
    const words = text.match(/\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|[a-z]\w*|\*\*|\S/gi) || [];
    let at = 0;
    const fail = (expected) => {
      throw new Error(`expected ${expected}; received ${words[at] === undefined ? "the end" : `"${words[at]}"`}`);
    };
    const take = (word) => words[at] === word && ++at;
    const need = (word) => take(word) || fail(`"${word}"`);
    const chainOf = (part, symbols) => () => {
      let left = part();
      while (symbols.includes(words[at])) {
        const [operation, a] = [OPERATIONS[words[at++]], left];
        const b = part();
        left = (l, r) => operation(a(l, r), b(l, r));
      }
      return left;
    };
    function atom() {
      const word = words[at];
      if (take("(")) {
        const inside = sum();
        need(")");
        return inside;
      }
      if (/^[\d.]/.test(word)) return (at++, () => constant(Number(word)));
      if (take("l")) return (l) => [l, 1];
      if (take("r")) return (l, r) => [r, r];
      if (!Object.hasOwn(FUNCTIONS, word)) fail(`l, r, a number or one of ${Object.keys(FUNCTIONS).join(", ")}`);
      at++;
      need("(");
      const given = [sum()];
      while (take(",")) given.push(sum());
      const wanted = { min: 2, max: 2, clamp: 3 }[word] || 1;
      if (given.length !== wanted) throw new Error(`expected ${wanted} arguments of ${word}; received ${given.length}`);
      need(")");
      return (l, r) => FUNCTIONS[word](...given.map((f) => f(l, r)));
    }
    function power() {
      const base = atom();
      if (!take("^") && !take("**")) return base;
      const exponent = unary();
      return (l, r) => OPERATIONS["^"](base(l, r), exponent(l, r));
    }
    function unary() {
      if (take("+")) return unary();
      if (!take("-")) return power();
      const of = unary();
      return (l, r) => OPERATIONS["-"](constant(0), of(l, r));
    }
    const product = chainOf(unary, ["*", "/"]);
    const sum = chainOf(product, ["+", "-"]);
    const result = sum();
    if (at < words.length) fail("an operator");
    return result;
  }

  // The coefficient of a token's score: what is differentiated, and the credit that a reward puts on it.

  function lossOf(state) {
    const loss = parse(state.loss);
    const path = (l, r) => (state.place === "reward" ? 0 : loss(l, r)[1]);
    const credit = (l, r) => (state.place === "loss" ? 0 : loss(l, r)[0]);
    const own = (l, r = 1) => path(l, r) + credit(l, r);
    const atRef = own(0);
    return { path, credit, own, slope: (l) => own(l) - atRef, constant: atRef, value: (l) => loss(l, 1)[0] };
  }

  function boundOf(state) {
    const { low, high } = state;
    const bounds = {
      none: (w) => w,
      truncate: (w) => Math.min(w, high),
      clip: (w) => Math.min(Math.max(w, low), high),
      mask: (w) => (w >= low && w <= high ? w : 0),
    };
    return state.ratio === "none" ? () => 1 : bounds[state.bound];
  }

  // Which divergence a curve is the slope of.

  const range = (from, to, count) => Array.from({ length: count }, (_, i) => from + ((to - from) * i) / (count - 1));
  const GRID = [...range(-30, 30, 61), ...range(-1.95, 1.95, 40)].sort((a, b) => a - b);
  const alpha = (order) => (l) => (order === 1 ? l : -Math.expm1((order - 1) * l) / (1 - order));
  const jensenShannon = (beta) => (l) => -(1 - beta) * Math.log(beta * Math.exp(-l) + 1 - beta);
  const SLOPES = {
    "reverse-kl": (l) => l,
    "forward-kl": k3Slope,
    "chi-square": Math.expm1,
    hellinger: alpha(0.5),
    "total-variation": Math.sign,
    "jensen-shannon": jensenShannon(0.5),
    k2: (l) => (l * l) / 2,
    k3,
  };
  const SUMS = [
    ["reverse-kl", "forward-kl"],
    ["reverse-kl", "k2"],
    ["reverse-kl", "chi-square"],
    ["forward-kl", "chi-square"],
  ];
  const EXACT = 1e-9;

  function slopeOf(name) {
    const [, kind, order] = name.match(/^([\w-]+)\((.*)\)$/) || [];
    return kind ? (kind === "alpha" ? alpha : jensenShannon)(Number(order)) : SLOPES[name];
  }

  function roundShort(x, same = EXACT) {
    for (const digits of [6, 9]) {
      const short = Number(x.toPrecision(digits));
      if (Math.abs(short - x) <= same * Math.max(Math.abs(x), 1e-3)) return short;
    }
    return x;
  }

  function weigh(points, names) {
    const [f, g] = names.map(slopeOf);
    const sums = [0, 0, 0, 0, 0];
    for (const [l, y] of points.filter(([l]) => Math.abs(l) <= 4)) {
      const [a, b] = [f(l), g ? g(l) : 0];
      [a * a, a * b, b * b, a * y, b * y].forEach((x, i) => (sums[i] += x));
    }
    const [aa, ab, bb, ay, by] = sums;
    const determinant = aa * bb - ab * ab;
    const weights = g ? [(ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant] : [ay / aa];
    const size = Math.min(1, Math.max(1e-3, ...points.map(([, y]) => Math.abs(y))));
    const fits = points.every(([l, y]) => {
      const allowed = EXACT * (1 + Math.abs(y)) + 1e-5 * EXACT * Math.exp(Math.abs(l)) * size;
      return Math.abs(l) >= 29.5 || Math.abs(weights[0] * f(l) + (g ? weights[1] * g(l) : 0) - y) <= allowed;
    });
    if (!fits || weights.some((w) => !(Math.abs(w) > EXACT))) return null;
    return Object.fromEntries(names.map((name, i) => [name, roundShort(weights[i])]));
  }

  // The two sides of where a condition turns from true to false.
  function bisect(isBelow, low, high, count) {
    for (let i = 0; i < count; i++) {
      const middle = (low + high) / 2;
      if (isBelow(middle)) low = middle;
      else high = middle;
    }
    return [low, high];
  }

  function withOneNumber(points) {
    const [up, down] = [1, -1].map((l) => (points.find((p) => p[0] === l) || [])[1]);
    if (!(up * down < 0)) return [];
    const isBelow = (beta) => -jensenShannon(beta)(-1) / jensenShannon(beta)(1) > -down / up;
    const [beta] = bisect(isBelow, 1e-6, 1 - 1e-6, 60);
    return [`alpha(${roundShort(1 - Math.log(-down / up))})`, `jensen-shannon(${roundShort(beta)})`];
  }

  function fit(points) {
    if (points.length <= 6) return null;
    for (const names of [...Object.keys(SLOPES).map((n) => [n]), ...SUMS, ...withOneNumber(points).map((n) => [n])]) {
      const shares = weigh(points, names);
      if (shares) return shares;
    }
    return null;
  }

  function edgeOf(curve, points) {
    const level = points[0][1];
    const isLevel = (y) => Math.abs(y - level) <= 1e-12 * (1 + Math.abs(level));
    const other = points.findIndex(([, y]) => !isLevel(y));
    if (other < 2) return [null, null];
    const [flat] = bisect((l) => isLevel(curve(l)), points[other - 1][0], points[other][0], 40);
    return [roundShort(flat), level];
  }

  function readCurve(curve) {
    const points = GRID.map((l) => [l, curve(l)]);
    const largest = Math.max(...points.map(([, y]) => Math.abs(y)));
    const rises = (of) => of.every(([, y], i) => i === 0 || y - of[i - 1][1] >= -1e-9 * largest);
    const found = { shares: {}, low: null, high: null, below: null, above: null, slope: curve, zero: largest === 0 };
    if (found.zero || !Number.isFinite(largest)) return { ...found, convex: rises(points) };
    const shares = fit(points);
    if (shares) {
      // In `r * k3(l)` two exponentials cancel, and leave rounding where l is far below 0. The named curve has none.
      const slope = (l) => Object.entries(shares).reduce((sum, [name, weight]) => sum + weight * slopeOf(name)(l), 0);
      return { ...found, shares, slope, convex: rises(GRID.map((l) => [l, slope(l)])) };
    }
    const [low, below] = edgeOf(curve, points);
    const [high, above] = edgeOf(curve, [...points].reverse());
    const inside = points.filter(([l]) => l > (low ?? -Infinity) && l < (high ?? Infinity));
    return { ...found, convex: rises(points), shares: fit(inside) || {}, low, below, high, above };
  }

  // The parts of a loss, by the names of `Anatomy.to_dict`.

  const named = (name, weight) => {
    const [, kind, order] = name.match(/^([\w-]+)\((.*)\)$/) || [null, name];
    const beta = kind === "jensen-shannon" ? (order === undefined ? 0.5 : Number(order)) : null;
    const scale = kind === "total-variation" ? null : weight * (beta === null ? 1 : beta * (1 - beta));
    const number = order === undefined ? {} : { [kind === "alpha" ? "alpha" : "beta"]: Number(order) };
    return { name: kind, scale, weight, ...number };
  };

  function divergenceOf(slope) {
    const curve = readCurve(slope);
    const totals = {};
    for (const [name, weight] of Object.entries(curve.shares)) {
      const pair = name === "k3" ? { "reverse-kl": weight, "forward-kl": -weight } : { [name]: weight };
      for (const [each, w] of Object.entries(pair)) totals[each] = (totals[each] || 0) + w;
    }
    const parts = Object.entries(totals)
      .filter(([, w]) => Math.abs(w) > EXACT)
      .map(([n, w]) => named(n, w));
    const isOther = (!parts.length && !curve.zero) || "k2" in totals;
    const first = isOther
      ? { name: "other" }
      : parts.length > 1
        ? { name: "sum", parts }
        : parts[0] || { name: "nothing" };
    const jumps = "total-variation" in totals;
    const near = (slope(1e-4) - slope(-1e-4)) / 2e-4;
    return {
      ...first,
      scale: jumps ? null : Math.abs(near) < 1e-6 ? 0 : roundShort(near, 1e-6),
      flat_below: curve.low,
      flat_above: curve.high,
      pull_below: curve.below,
      pull_above: curve.above,
      convex: curve.convex,
    };
  }

  function samplesOf(state, loss) {
    const plain = { ratio: state.ratio, bound: null };
    if (state.ratio !== "none") {
      const { bound, low, high } = state;
      return bound === "none"
        ? plain
        : { ...plain, bound: { kind: bound, low: bound === "truncate" ? null : low, high } };
    }
    const along = (l, x) => loss.own(l, Math.exp(x)) / loss.own(l, 1);
    const places = [0.75, -0.5].filter((l) => loss.own(l, 1));
    if (places.every((l) => [-2, -0.02, 0.02, 2].every((x) => Math.abs(along(l, x) - 1) <= EXACT))) return plain;
    const follows = (x) => places.every((l) => Math.abs(along(l, x) / Math.exp(x) - 1) <= 1e-8);
    if (!follows(0.02) || !follows(-0.02)) return { ratio: "other", bound: null };
    const edges = [-1, 1].map((sign) => {
      if (follows(15 * sign)) return null;
      const [low] = bisect((x) => follows(sign * x), 0, 15, 45);
      return roundShort(Math.exp(sign * low), 1e-8);
    });
    if (edges[0] === null && edges[1] === null) return { ratio: "token", bound: null };
    const masks = along(0.75, edges[1] === null ? -15 : 15) === 0;
    const kind = masks ? "mask" : edges[0] === null ? "truncate" : "clip";
    return { ratio: "token", bound: { kind, low: edges[0], high: edges[1] } };
  }

  function takeApart(state) {
    const loss = lossOf(state);
    const divergence = divergenceOf(loss.slope);
    const ahead =
      state.place !== "loss" &&
      state.horizon !== "none" &&
      divergenceOf((l) => loss.value(l) - loss.value(0)).name !== "nothing";
    const estimate = ahead
      ? { "reverse-kl": "k1", k2: "k2", k3: "k3" }[Object.keys(readCurve(loss.value).shares)[0]] || "other"
      : null;
    const isDiscount = state.horizon === "discount" && state.discount !== 1;
    const baseline = state.place === "loss" ? "none" : state.baseline;
    return {
      divergence,
      horizon: {
        kind: ahead ? (isDiscount ? "discount" : "all") : "none",
        discount: ahead && isDiscount ? state.discount : null,
        estimate,
      },
      past_credit: ahead && state.horizon === "whole",
      samples: samplesOf(state, loss),
      unit: state.unit,
      baseline: baseline === "group-std" ? "group-mean" : baseline,
      divided_by_spread: baseline === "group-std",
      constant: Math.abs(loss.constant) <= EXACT ? 0 : roundShort(loss.constant),
    };
  }

  // f(u), the integral of the slope c(log v) over v from 1 to u, at several l = log u, by Gauss and Legendre.

  const NODES = [0.1834346424956498, 0.525532409916329, 0.7966664774136267, 0.9602898564975363];
  const WEIGHTS = [0.362683783378362, 0.3137066458778873, 0.2223810344533745, 0.1012285362903763];

  function integrate(slope, from, to) {
    const [middle, half] = [(from + to) / 2, (to - from) / 2];
    const at = (x) => slope(middle + half * x) * Math.exp(middle + half * x);
    return half * NODES.reduce((sum, x, i) => sum + WEIGHTS[i] * (at(x) + at(-x)), 0);
  }

  function generator(slope, logs, edges = []) {
    const cuts = [0, ...edges.filter((x) => x !== null), ...range(-8, 8, 65), ...logs];
    const values = new Map([[0, 0]]);
    for (const side of [cuts.filter((x) => x > 0), cuts.filter((x) => x < 0)]) {
      let [before, total] = [0, 0];
      for (const l of [...new Set(side)].sort((a, b) => Math.abs(a) - Math.abs(b))) {
        total += integrate(slope, before, l);
        values.set((before = l), total);
      }
    }
    return logs.map((l) => values.get(l));
  }

  // Three tokens: where the policy ends, and what one step does.

  const normalise = (p) => p.map((x) => x / p.reduce((a, b) => a + b));
  const tilt = (p, log) => normalise(p.map((x, i) => x * Math.exp(log[i])));
  const WIDEST = 300;

  // The optimum of E[reward] - beta D_f, pi = ref exp(c^-1((reward - level) / beta)), for a slope c that never falls.
  function optimum(curve, ref, reward, beta) {
    const { slope } = readCurve(curve);
    const logRatio = (pull) => bisect((l) => slope(l) < pull, -WIDEST, WIDEST, 70)[0];
    const at = (level) => reward.map((x, i) => ref[i] * Math.exp(logRatio((x - level) / beta)));
    const total = (p) => p.reduce((a, b) => a + b);
    const isOver = (level) => total(at(level)) > 1;
    const [below, above] = bisect(isOver, Math.min(...reward), Math.max(...reward), 70).map(at);
    // Where c jumps, so do the probabilities: those of both sides are mixed.
    const share = total(below) > total(above) ? (1 - total(above)) / (total(below) - total(above)) : 0;
    return normalise(above.map((p, i) => p + Math.min(Math.max(share, 0), 1) * (below[i] - p)));
  }

  // Where the gradient leads from ref, for a slope that falls somewhere: another start may lead elsewhere.
  function follow(curve, ref, reward, beta) {
    const { slope } = readCurve(curve);
    let p = ref;
    for (let i = 0; i < 20000; i++) {
      const log = p.map((x, j) => Math.log(x / ref[j]));
      const pull = log.map((l, j) => reward[j] - beta * slope(l));
      const mean = pull.reduce((sum, a, j) => sum + p[j] * a, 0);
      if (pull.every((a, j) => p[j] * Math.abs(a - mean) < 1e-11)) break;
      const steep = Math.max(...log.map((l) => Math.abs(slope(l + 1e-4) - slope(l - 1e-4)) / 2e-4));
      p = tilt(
        p,
        pull.map((a) => Math.max(-1, Math.min(1, (a - mean) / (1 + beta * steep)))),
      );
      p = normalise(p.map((x) => Math.max(x, 1e-12)));
    }
    return p;
  }

  const GROUP = 4;

  // The expected gradient by the logits of pi, summed over every token that mu samples, or over every group of four.
  function gradient(state, policy, ref, sampler) {
    const loss = lossOf(state);
    const bound = boundOf(state);
    const at = policy.map((p, i) => {
      const [l, r] = [Math.log(p / ref[i]), p / sampler[i]];
      const w = bound(r);
      return { path: w * loss.path(l, r), credit: loss.credit(l, r), w };
    });
    const baseline = state.place === "loss" ? "none" : state.baseline;
    const expected = policy.map(() => 0); // of coefficient times indicator, by token
    if (baseline === "none") at.forEach((a, i) => (expected[i] = sampler[i] * (a.path + a.w * a.credit)));
    else
      for (let code = 0; code < 3 ** GROUP; code++) {
        const tokens = Array.from({ length: GROUP }, (_, i) => Math.floor(code / 3 ** i) % 3);
        const chance = tokens.reduce((x, t) => x * sampler[t], 1);
        const mean = tokens.reduce((x, t) => x + at[t].credit, 0) / GROUP;
        const spread = Math.sqrt(tokens.reduce((x, t) => x + (at[t].credit - mean) ** 2, 0) / (GROUP - 1));
        const factor = { "leave-one-out": GROUP / (GROUP - 1), "group-mean": 1, "group-std": 1 / (spread + 1e-4) }[
          baseline
        ];
        for (const t of tokens)
          expected[t] += (chance / GROUP) * (at[t].path + at[t].w * factor * (at[t].credit - mean));
      }
    const all = expected.reduce((a, b) => a + b);
    return expected.map((x, i) => x - policy[i] * all);
  }

  const step = (state, policy, ref, sampler, rate) =>
    tilt(
      policy,
      gradient(state, policy, ref, sampler).map((g) => -rate * g),
    );

  return { parse, lossOf, boundOf, takeApart, generator, optimum, follow, gradient, step, tilt, range };
})();
