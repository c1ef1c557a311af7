"use strict";
// The page: the form is the state, the address carries what differs from its defaults.
(() => {
  const REF = [0.5, 0.3, 0.2];
  const RATE = 0.5; // of the step
  const form = document.getElementById("choice");
  const [ends, steps] = ["ends", "steps"].map((id) => document.querySelector(`#${id} tbody`));
  const short = (x) => String(Number(x.toPrecision(3)));
  const element = (tag, text = "", cls = "") =>
    Object.assign(document.createElement(tag), { textContent: text, className: cls });

  "ABC".split("").forEach((name, i) => {
    for (const body of [ends, steps]) body.append(element("tr"));
    const row = ends.lastChild;
    const cell = element("td", "", "play-range");
    const attributes = {
      type: "range",
      name: `reward${name}`,
      min: -1,
      max: 1,
      step: 0.05,
      ariaLabel: `reward of ${name}`,
    };
    const input = Object.assign(element("input"), attributes);
    input.setAttribute("form", "choice");
    input.setAttribute("value", [1, 0.3, 0][i]);
    cell.append(input, element("output"));
    row.append(element("th", name), cell, ...[0, 0, 0].map(() => element("td")));
    steps.lastChild.append(element("th", name), ...[0, 0, 0, 0].map(() => element("td")));
  });

  // The state.

  const fields = [...form.elements].filter((field) => field.name);
  const read = (of) =>
    Object.fromEntries(fields.map((f) => [f.name, /range|number/.test(f.type) ? Number(of(f)) : of(f)]));
  const initial = (f) => (f.options ? f.options[0].value : f.defaultValue);
  const defaults = read(initial);

  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    if (![...given.keys()].every((key) => key in defaults)) return; // an anchor of the page
    for (const field of fields) {
      field.value = given.get(field.name) ?? initial(field);
      if (field.options && field.selectedIndex < 0) field.selectedIndex = 0;
    }
    show();
  }

  function writeAddress(state) {
    const changed = Object.entries(state).filter(([key, value]) => value !== defaults[key] || key === "loss");
    history.replaceState(null, "", `#${new URLSearchParams(changed)}`);
  }

  // The plots.

  const css = (name) => getComputedStyle(document.querySelector(".play")).getPropertyValue(name);
  const plots = new Map();

  function draw(id, x, series, range) {
    const node = document.getElementById(id);
    const line = (color, dash) => ({
      stroke: () => css(color),
      width: dash ? 1.5 : 2.5,
      dash,
      points: { show: false },
    });
    const axis = {
      stroke: () => css("--play-text"),
      grid: { stroke: () => css("--play-grid") },
      ticks: { show: false },
      size: 34,
    };
    const options = {
      width: node.clientWidth,
      height: 220,
      pxAlign: 0,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false }, y: { range } },
      axes: [axis, axis],
      series: [{}, line("--play-own"), line("--play-reverse", [6, 4])], // the dashes lie on the line
    };
    plots.get(id)?.destroy();
    plots.set(id, new uPlot(options, [x, ...series], node));
  }

  function drawCurves(loss, parts) {
    const { range, generator } = Mathematics;
    const logs = range(-4, 4, 321);
    const own = logs.map((l) => loss.own(l));
    const bounded = (values, low, high) => [Math.max(low, Math.min(...values)), Math.min(high, Math.max(...values))];
    const [low, high] = bounded([...own, -4, 4], -5, 5);
    draw("coefficient", logs, [own, logs], [low, high]);
    const ratios = range(0.02, 3, 150);
    const edges = [parts.divergence.flat_below, parts.divergence.flat_above];
    const f = (slope) => generator(slope, ratios.map(Math.log), edges);
    const [reverse, mine] = [f((l) => l), f(loss.slope)];
    draw("generator", ratios, [mine, reverse], bounded([...reverse, ...mine], -1.5, 2.5));
  }

  // The tables.

  function bar(cell, p, before) {
    const change = before === undefined || Math.abs(p - before) < 5e-4 ? "" : p > before ? " ▲" : " ▼";
    cell.textContent = p.toFixed(3) + change;
    cell.className = "play-bar";
    cell.style.setProperty("--p", `${100 * p}%`);
  }

  function fill(body, columns) {
    columns.forEach((cells, j) => cells.forEach((write, i) => write && write(body.rows[i].cells[j])));
  }

  function showEnd(loss, parts, reward, beta) {
    const { optimum, follow } = Mathematics;
    const falls = !parts.divergence.convex;
    const mine = parts.divided_by_spread ? null : (falls ? follow : optimum)(loss.slope, REF, reward, beta);
    const reverse = optimum((l) => l, REF, reward, beta);
    const bars = (p, before) => p.map((x, i) => (cell) => bar(cell, x, before && before[i]));
    const none = REF.map(() => (cell) => Object.assign(cell, { textContent: "–", className: "" }));
    fill(ends, [[], [], bars(REF), mine ? bars(mine) : none, bars(reverse)]);
    const gain = (p) => short(p.reduce((sum, x, i) => sum + x * reward[i], 0));
    const text = parts.divided_by_spread
      ? "Divided by a spread the loss has no fixed optimum: its strength depends on the batch."
      : `Expected reward ${gain(mine)}, with the reverse KL ${gain(reverse)}. `;
    const how = falls
      ? "The coefficient falls somewhere: this is where the gradient leads from ref, and from another start it may lead elsewhere."
      : "";
    document.getElementById("ending").textContent = text + (mine ? how : "");
  }

  function showSteps(state, reward) {
    const { tilt, step } = Mathematics;
    const policy = tilt(
      REF,
      reward.map((x) => state.far * x),
    );
    const sampler = tilt(
      REF,
      reward.map((x) => state.far * x * (1 - state.stale)),
    );
    const bars = (p, before) => p.map((x, i) => (cell) => bar(cell, x, before && before[i]));
    const after = (mu) => bars(step(state, policy, REF, mu, RATE), policy);
    const logs = policy.map((p, i) => (cell) => (cell.textContent = short(Math.log(p / REF[i]))));
    fill(steps, [[], logs, bars(policy), after(policy), after(sampler)]);
  }

  function showCode(parts, state) {
    const { term, settings } = Sentences;
    const declared = term(parts);
    const choices = [{ framework: "klgrad", lines: declared.code, note: declared.why }];
    for (const found of settings(parts, state, Mathematics.takeApart, defaults)) {
      const note = found.differs.length ? `the nearest; it differs in: ${found.differs.join(", ")}` : "";
      choices.push({
        ...found,
        note: found.lines ? note : "No setting that is audited has this divergence and horizon.",
      });
    }
    const nodes = choices.flatMap(({ framework, lines, note }) => {
      const head = element("p", note ? ` ${note}` : "");
      head.prepend(element("strong", framework));
      return lines ? [head, Object.assign(element("pre"), { tabIndex: 0 }), lines] : [head];
    });
    const shown = nodes.map((node, i) =>
      typeof node === "string" ? (nodes[i - 1].append(element("code", node)), null) : node,
    );
    document.getElementById("code").replaceChildren(...shown.filter(Boolean));
  }

  function show() {
    const state = read((field) => field.value);
    for (const output of document.querySelectorAll(".play-range output"))
      output.value = output.previousElementSibling.value;
    const estimator = document.getElementById("estimator");
    const bare = (text) => text.replace(/\s/g, "");
    const preset = [...estimator.options].find((option) => bare(option.value) === bare(state.loss));
    estimator.value = preset ? preset.value : "";
    const ownRatio = /\br\b/.test(state.loss);
    const off = { horizon: state.place === "loss", discount: state.horizon !== "discount" || state.place === "loss" };
    Object.assign(off, {
      baseline: state.place === "loss",
      ratio: ownRatio,
      bound: ownRatio || state.ratio === "none",
    });
    Object.assign(off, { high: off.bound || state.bound === "none", low: off.bound || !/clip|mask/.test(state.bound) });
    for (const [name, disabled] of Object.entries(off)) form.elements[name].disabled = disabled;
    if (ownRatio) state.ratio = "none";
    const error = document.getElementById("error");
    try {
      const [loss, parts] = [Mathematics.lossOf(state), Mathematics.takeApart(state)];
      error.textContent = "";
      const rows = Sentences.rows(parts).flatMap(([name, text]) => [element("dt", name), element("dd", text)]);
      document.getElementById("parts").replaceChildren(...rows);
      drawCurves(loss, parts);
      const reward = [state.rewardA, state.rewardB, state.rewardC];
      showEnd(loss, parts, reward, state.beta);
      showSteps(state, reward);
      showCode(parts, state);
    } catch (problem) {
      error.textContent = problem.message;
    }
    writeAddress(state);
  }

  document.getElementById("estimator").addEventListener("change", ({ target }) => {
    if (target.value) form.elements.loss.value = target.value;
    else form.elements.loss.select();
    show();
  });
  document.addEventListener("input", ({ target }) => fields.includes(target) && show());
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", readAddress);
  window.addEventListener("resize", show);
  new MutationObserver(show).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  readAddress();
})();
