// Draws the curves of the page, and keeps a live page up to date. Texts of runs only ever become text nodes.
"use strict";
(() => {
  const LIGHT = ["#2f6fde", "#d1495b", "#2a9d6f", "#b7791f", "#7a4fc9", "#0e8fa8", "#c2528b", "#64748b", "#6b8e23", "#a0522d"];
  const DARK = ["#7aa7ff", "#ff8a98", "#5fd3a3", "#f0b860", "#b79bf5", "#5cc9df", "#f092c2", "#a3b1c6", "#b5d267", "#dd9a6f"];
  const MARKS = {
    skipped: ["update skipped", "#d1495b", [2, 2]],
    rolled_back: ["rolled back", "#e07b00", []],
    died: ["died", "#b00020", []],
    stopped: ["stopped", "#8a94a6", [5, 4]],
    started: ["started or continued", "#8a94a6", [1, 3]],
    checkpoint: ["checkpoint", "#2a9d6f", null],
  };
  const HEIGHT = 250, PRINTED_WIDTH = 340, NEAR_PX = 5, POLL_MS = 2000, SMOOTHEST = 0.2;
  const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power);
  const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]], SVG = "http://www.w3.org/2000/svg";

  const byId = (id) => document.getElementById(id);
  const state = { axis: "step", smooth: 0, logarithms: new Set(), hidden: new Set(), range: null, printing: false };
  let data, runs, charts = [];

  function make(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  // Numbers

  function decoded(columns) {
    const arrays = {};
    for (const [name, text] of Object.entries(columns)) {
      const bytes = atob(text), view = new Uint8Array(bytes.length);
      for (let i = 0; i < bytes.length; i++) view[i] = bytes.charCodeAt(i);
      arrays[name] = new Float64Array(view.buffer);
    }
    return arrays;
  }

  function compact(value) {
    for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(value) >= unit) return Number((value / unit).toPrecision(4)) + name;
    return String(Number(value.toPrecision(4)));
  }

  const FORMATS = {
    number: (value) => Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3)
      ? value.toExponential(3).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(5))),
    rate: compact,
    bytes: (value) => value >= 2 ** 30 ? Number((value / 2 ** 30).toPrecision(4)) + " GiB" : Number((value / 2 ** 20).toPrecision(4)) + " MiB",
    seconds: (value) => value && Math.abs(value) < 1 ? Number((value * 1e3).toPrecision(4)) + " ms" : Number(value.toPrecision(4)) + " s",
    share: (value) => Number((value * 100).toPrecision(4)) + "%",
  };

  // An exponential mean over the distance in steps, since kept rows are not equally far apart.
  function smoothed(steps, values) {
    const span = steps.length ? steps[steps.length - 1] - steps[0] : 0;
    const reach = span * SMOOTHEST * (state.smooth / 100) ** 2;
    let mean = null, before = 0;
    return Array.from(values, (value, i) => {
      if (!Number.isFinite(value)) return null;
      mean = mean === null ? value : mean + (1 - Math.exp((before - steps[i]) / reach)) * (value - mean);
      before = steps[i];
      return mean;
    });
  }

  function positionOf(run, step) {
    const steps = run.training.step, values = run.training[state.axis];
    if (state.axis === "step") return step;
    if (!values || !steps.length) return null;
    if (step > steps[steps.length - 1]) return values[values.length - 1];
    let after = 0;
    for (let end = steps.length - 1; after < end;) {
      const middle = (after + end) >> 1;
      if (steps[middle] < step) after = middle + 1;
      else end = middle;
    }
    const step0 = after ? steps[after - 1] : 0, value0 = after ? values[after - 1] : 0;
    return steps[after] === step0 ? values[after] : value0 + (values[after] - value0) * (step - step0) / (steps[after] - step0);
  }

  function wholeRange() {
    let most = 0;
    for (const run of shownRuns())
      for (const table of [run.training, run.evaluation])
        if (table[state.axis]?.length) most = Math.max(most, table[state.axis][table[state.axis].length - 1]);
    return [0, most || 1];
  }

  const shownRuns = () => runs.filter((run) => !state.hidden.has(run.number));
  const isDark = () => !state.printing && (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const colorOf = (number) => (isDark() ? DARK : LIGHT)[number % LIGHT.length];

  // Charts

  function curvesOf(chart) {
    const curves = [], clean = (values) => Array.from(values, (value) =>
      Number.isFinite(value) && (value > 0 || !state.logarithms.has(chart.title)) ? value : null);
    const predicts = chart.training.includes("peak_memory_bytes") && runs.some((run) => run.predicted_memory);
    const several = chart.training.length + chart.evaluation.length > 1 || predicts, beside = runs.length > 1;
    for (const run of shownRuns()) {
      const names = [...chart.training.map((name) => ["training", name]), ...chart.evaluation.map((name) => ["evaluation", name])];
      names.forEach(([table, name], place) => {
        const xs = run[table][state.axis], ys = run[table][name], steps = run[table].step;
        if (!xs || !ys) return;
        const evaluated = table === "evaluation";
        const column = predicts ? "measured" : name.replace(/^[^/]*\//, "") + (evaluated && chart.training.includes(name) ? ", evaluation" : "");
        const label = [beside && run.name, several && column].filter(Boolean).join(" · ") || name;
        const line = { label, column, run, color: beside ? run.number : place, dash: beside ? DASHES[place % DASHES.length] : [], xs, evaluated };
        const isSmoothed = state.smooth > 0 && !evaluated;
        curves.push({ ...line, ys: clean(ys), faint: isSmoothed });
        if (isSmoothed) curves.push({ ...line, ys: clean(smoothed(steps, ys)), label: label + ", smoothed", mean: true });
      });
      if (predicts && run.predicted_memory && run.training[state.axis]?.length) {
        const label = [beside && run.name, "predicted"].filter(Boolean).join(" · "), most = run.predicted_memory;
        curves.push({ label, column: "predicted", run, color: beside ? run.number : 0, dash: [4, 4], xs: wholeRange(), ys: [most, most] });
      }
    }
    return curves;
  }

  function drawMarks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const mark of shownMarks()) {
      const x = u.valToPos(mark.x, "x", true), [, color, dash] = MARKS[mark.event];
      ctx.strokeStyle = ctx.fillStyle = color;
      ctx.globalAlpha = dash === null ? 1 : 0.75;
      ctx.beginPath();
      if (dash === null) {
        const bottom = bbox.top + bbox.height, size = 4 * devicePixelRatio;
        ctx.moveTo(x, bottom - size * 1.6);
        ctx.lineTo(x - size, bottom);
        ctx.lineTo(x + size, bottom);
        ctx.fill();
        continue;
      }
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function shownMarks() {
    const marks = [];
    for (const run of shownRuns())
      for (const mark of run.marks) {
        const x = MARKS[mark.event] && (mark.step || mark.event !== "started") ? positionOf(run, mark.step) : null;
        if (x !== null) marks.push({ ...mark, run, x });
      }
    return marks;
  }

  function showTip(chart, u) {
    const { left, idxs } = u.cursor, tip = chart.tip;
    tip.hidden = !(left >= 0) || !idxs;
    if (tip.hidden) return;
    const unit = FORMATS[chart.unit], rows = [], x = u.posToVal(left, "x");
    chart.curves.forEach((curve, i) => {
      const at = idxs[i + 1];
      if (at == null || u.data[i + 1][at] === undefined) return;
      const value = u.data[i + 1][at];
      const swatch = make("i", {});
      swatch.style.background = colorOf(curve.color);
      rows.push(make("div", {}, swatch, make("span", { textContent: curve.label }), make("b", { textContent: value === null ? "—" : unit(value) })));
    });
    const near = shownMarks().filter((mark) => Math.abs(u.valToPos(mark.x, "x") - left) <= NEAR_PX).slice(0, 4);
    const notes = near.map((mark) => make("p", { textContent: `${MARKS[mark.event][0]}, step ${mark.step.toLocaleString("en")}${mark.text ? ": " + mark.text : ""}` }));
    tip.replaceChildren(make("div", { className: "quiet", textContent: `${state.axis} ${FORMATS.rate(x)}` }), ...rows, ...notes);
    const half = u.over.clientWidth / 2;
    tip.style.left = left < half ? `${u.over.offsetLeft + left + 14}px` : "";
    tip.style.right = left < half ? "" : `${chart.box.clientWidth - u.over.offsetLeft - left + 14}px`;
  }

  // Each curve has positions of its own; at one of another curve it shows its nearest value.
  function nearestIndex(u, series, index) {
    const values = u.data[series];
    if (!series || values[index] !== undefined) return index;
    for (let away = 1; away < values.length; away++) {
      if (values[index - away] !== undefined) return index - away;
      if (values[index + away] !== undefined) return index + away;
    }
    return null;
  }

  function options(chart) {
    const css = getComputedStyle(document.body), text = state.printing ? "#555" : css.getPropertyValue("--quiet");
    const grid = { stroke: state.printing ? "#ddd" : css.getPropertyValue("--line"), width: 1 };
    const font = "11px " + css.fontFamily, isLog = state.logarithms.has(chart.title);
    const axis = { stroke: text, grid, ticks: grid, font };
    return {
      width: state.printing ? PRINTED_WIDTH : Math.max(200, chart.box.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      scales: { x: { time: false, range: () => state.range || wholeRange() }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map((tick) => tick == null ? "" : compact(tick)) },
        { ...axis, size: 70, incrs: chart.unit === "bytes" ? POWERS : undefined, values: (_, ticks) => ticks.map((tick) => tick == null ? "" : FORMATS[chart.unit](tick)) },
      ],
      series: [{}, ...chart.curves.map((curve) => ({
        label: curve.label,
        stroke: colorOf(curve.color),
        alpha: curve.faint ? 0.25 : 1,
        width: curve.mean || curve.evaluated ? 2 : 1.3,
        dash: curve.dash,
        points: curve.evaluated ? { show: true, size: 6 } : curve.mean || curve.column === "predicted" ? { show: false } : {},
      }))],
      cursor: {
        sync: { key: "charts", setSeries: false },
        drag: { x: true, y: false, setScale: false },
        dataIdx: nearestIndex,
        bind: { dblclick: () => () => { zoom(null); return null; } },
      },
      hooks: {
        draw: [drawMarks],
        setCursor: [(u) => showTip(chart, u)],
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width > 3 && u.cursor.event !== null) zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
      },
    };
  }

  // One run has a colour for each column; several runs have a colour each, and a dash for each column.
  function showLegend(chart) {
    const columns = new Map(chart.curves.map((curve) => [curve.column, curve]));
    const entries = Array.from(columns.values(), ({ column, color, dash }) => {
      const line = document.createElementNS(SVG, "line"), key = document.createElementNS(SVG, "svg");
      for (const [name, value] of Object.entries({ x2: 22, y1: 5, y2: 5, "stroke-dasharray": dash.join(" ") })) line.setAttribute(name, value);
      line.style.stroke = runs.length > 1 ? "currentColor" : colorOf(color);
      key.append(line);
      return make("span", {}, key, column);
    });
    chart.legend.replaceChildren(...(entries.length > 1 ? entries : []));
  }

  function draw(chart) {
    chart.plot?.destroy();
    chart.curves = curvesOf(chart);
    showLegend(chart);
    const tables = chart.curves.map((curve) => [curve.xs, curve.ys]);
    chart.data = tables.length ? uPlot.join(tables) : [[]];
    chart.plot = new uPlot(options(chart), chart.data, chart.box);
    chart.box.append(chart.tip);
    chart.box.setAttribute("aria-label", `${chart.title}: ${chart.curves.map((curve) => curve.label).join(", ")}`);
  }

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      charts.filter((chart) => chart.plot).forEach(draw);
    });
  }

  function zoom(range) {
    if (range && !(range[1] > range[0])) return;
    state.range = range;
    byId("whole").disabled = !range;
    const [min, max] = range || wholeRange();
    for (const { plot } of charts) plot?.setScale("x", { min, max });
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((one) => one.box === entry.target);
      if (entry.isIntersecting && chart && !chart.plot) draw(chart);
    }
  }, { rootMargin: "300px" });

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const chart = charts.find((one) => one.box === target);
      if (chart?.plot && !state.printing) chart.plot.setSize({ width: Math.max(200, target.clientWidth), height: HEIGHT });
    }
  });

  function makeCharts() {
    for (const chart of charts) {
      chart.plot?.destroy();
      seen.unobserve(chart.box);
      resized.unobserve(chart.box);
    }
    charts = data.charts.map((about) => {
      const box = make("div", { className: "chart" }), tip = make("div", { className: "tip", hidden: true });
      box.setAttribute("role", "img");
      const log = make("button", { type: "button", textContent: "log", title: "logarithmic scale" });
      const legend = make("span", { className: "legend" }), chart = { ...about, box, tip, legend, curves: [], plot: null };
      log.setAttribute("aria-label", `${about.title}: logarithmic scale`);
      log.setAttribute("aria-pressed", state.logarithms.has(about.title));
      log.addEventListener("click", () => {
        const isOn = !state.logarithms.delete(about.title) && !!state.logarithms.add(about.title);
        log.setAttribute("aria-pressed", isOn);
        draw(chart);
      });
      chart.figure = make("figure", {}, make("figcaption", {}, make("span", { textContent: about.title }), legend, log), box);
      return chart;
    });
    byId("charts").replaceChildren(...charts.map((chart) => chart.figure));
    for (const { box } of charts) {
      seen.observe(box);
      resized.observe(box);
    }
  }

  // Controls

  function showRuns() {
    const buttons = runs.map((run) => {
      const button = make("button", { type: "button", title: run.name }, make("i", {}), make("span", { textContent: run.name }));
      button.firstChild.style.background = colorOf(run.number);
      button.setAttribute("aria-pressed", !state.hidden.has(run.number));
      button.addEventListener("click", () => {
        const isShown = state.hidden.delete(run.number) || !state.hidden.add(run.number);
        button.setAttribute("aria-pressed", isShown);
        redraw();
      });
      return button;
    });
    byId("runs").replaceChildren(...(runs.length > 1 ? buttons : []));
    const events = new Set(runs.flatMap((run) => run.marks.filter((mark) => mark.step || mark.event !== "started").map((mark) => mark.event)));
    const kinds = Object.entries(MARKS).filter(([event]) => events.has(event)).map(([, [label, color, dash]]) => {
      const kind = make("span", {}, make("i", { className: dash === null ? "peak" : "" }), label);
      kind.firstChild.style.color = color;
      if (dash?.length) kind.firstChild.style.borderLeftStyle = dash[0] > 3 ? "dashed" : "dotted";
      return kind;
    });
    byId("kinds").replaceChildren(...kinds);
    const kept = runs.filter((run) => run.training.step.length < run.rows);
    const most = Math.max(...kept.map((run) => run.training.step.length)).toLocaleString("en");
    byId("kept").textContent = !kept.length ? "" : `Of a long run the curves have ${most} logged steps, among them those with ` +
      "the least and the greatest value of each curve in each of some hundred intervals.";
  }

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    showRuns();
    redraw();
  }

  function connect() {
    byId("controls").hidden = false;
    for (const radio of document.querySelectorAll("input[name=axis]"))
      radio.addEventListener("change", () => {
        state.axis = radio.value;
        zoom(null);
        redraw();
      });
    byId("smooth").addEventListener("input", (event) => {
      state.smooth = Number(event.target.value);
      redraw();
    });
    byId("whole").addEventListener("click", () => zoom(null));
    byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      showRuns();
      redraw();
    });
    addEventListener("beforeprint", () => print(true));
    addEventListener("afterprint", () => print(false));
  }

  function print(isPrinting) {
    state.printing = isPrinting;
    showRuns();
    charts.forEach(draw);
  }

  // A live page fetches itself again, and takes over what has changed.

  function load(text) {
    data = JSON.parse(text);
    runs = data.runs.map((run, number) => ({
      ...run, number, rows: run.training.rows, training: decoded(run.training.columns), evaluation: decoded(run.evaluation.columns),
    }));
  }

  async function poll() {
    let said = "";
    try {
      const answer = await fetch(location.pathname, { headers: { "If-None-Match": `"${data.revision}"` }, cache: "no-store" });
      if (answer.status === 200) update(new DOMParser().parseFromString(await answer.text(), "text/html"));
      said = answer.ok || answer.status === 304 ? "live" : `the server answers ${answer.status}`;
    } catch {
      said = "not connected";
    }
    byId("live").textContent = said;
    setTimeout(poll, POLL_MS);
  }

  function update(page) {
    const titles = JSON.stringify(data.charts);
    load(page.getElementById("data").textContent);
    for (const section of page.querySelectorAll("[data-live]")) {
      const old = document.querySelector(`[data-live="${section.dataset.live}"]`);
      const open = Array.from(old.querySelectorAll("details"), (one) => one.open);
      section.querySelectorAll("details").forEach((one, i) => { one.open = open[i] ?? one.open; });
      old.replaceWith(document.adoptNode(section));
    }
    showRuns();
    if (JSON.stringify(data.charts) === titles) redraw();
    else makeCharts();
  }

  load(byId("data").textContent);
  connect();
  showRuns();
  makeCharts();
  if (data.revision) setTimeout(poll, POLL_MS);
  window.report = { get charts() { return charts; }, get runs() { return runs; }, state, zoom, drawAll: () => charts.forEach(draw) };
})();
