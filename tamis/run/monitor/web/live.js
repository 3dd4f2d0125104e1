// Draws the state of a run: the one stored in the page, or each that the server sends. Text is set as text, never as HTML.

const COLOURS = ["#2f6fed", "#e4572e", "#17a398", "#a64ac9", "#d4a017", "#5c6b7a", "#c2185b", "#558b2f"];
const WIDTH = 460, HEIGHT = 220, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 22;
const FLAT = 5e-4;  // a smaller share of the value, which labels of four digits do not show, is drawn as a flat line
const FEW_POINTS = 30;  // fewer, as of validation, are not smoothed
const STALE_S = 300;  // a stored page is renewed every minute
let charts = [], shown = null;

function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function shape(name, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return +(value / 1e9).toFixed(2) + "G";
  if (size >= 1e6) return +(value / 1e6).toFixed(2) + "M";
  if (size >= 1e4) return +(value / 1e3).toFixed(1) + "k";
  return size !== 0 && size < 1e-2 ? value.toExponential(1) : String(+value.toPrecision(4));
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

function range(values, fromZero) {
  let low = Math.min(...values), high = Math.max(...values);
  if (fromZero) low = Math.min(0, low);
  if (high - low <= FLAT * Math.abs(high)) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
  return [low, fromZero ? high * 1.05 : high];
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
    found.push(...[1, 2, 5].map((factor) => factor * 10 ** power).filter((value) => value >= low && value <= high));
  return found.length > 1 ? found : ticks(low, high, 5);
}

function smoothedSeries([name, list]) {
  const values = smoothed(list.map((point) => point[1]), list.length > FEW_POINTS ? smoothingShare() : 0);
  return [name, list.map(([x], number) => [x, values[number]])];
}

function drawChart(given) {
  const chart = { ...given, series: given.series.map(smoothedSeries) };
  const points = chart.series.flatMap(([, list]) => list), log = isLog(points.every((point) => point[1] > 0));
  const [x0, x1] = range(points.map((p) => p[0]), false);
  const [y0, y1] = range(points.map((p) => p[1]), chart.zero && !log), scale = log ? Math.log10 : (value) => value;
  const x = (value) => LEFT + (value - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (scale(value) - scale(y0)) / (scale(y1) - scale(y0)) * (HEIGHT - TOP - BOTTOM);
  const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title });
  for (const value of log ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
    picture.append(shape("line", { class: "grid-line", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    picture.append(shape("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const value of ticks(x0, x1, 5))
    picture.append(shape("text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, short(value)));
  chart.series.forEach(([, list], number) => {
    const path = list.map(([px, py]) => `${x(px).toFixed(1)},${y(py).toFixed(1)}`).join(" ");
    picture.append(shape("polyline", { class: "series", stroke: COLOURS[number % COLOURS.length], points: path }));
    if (list.length === 1) picture.append(shape("circle", { cx: x(list[0][0]), cy: y(list[0][1]), r: 2.5 }));
  });
  const legend = make("div", { class: "legend" });
  const label = (at) => labelValues(legend, chart, at);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    label(x0 + ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0));
  });
  picture.addEventListener("pointerleave", () => label(null));
  label(null);
  const title = make("h2", {}, chart.title, make("small", { class: "dim" }, ` ${[chart.unit, "over " + chart.over].filter(Boolean).join(", ")}`));
  return make("div", { class: "box chart" }, title, picture, legend);
}

function labelValues(legend, chart, at) {
  const named = chart.series.map(([name, list], number) => {
    const near = at === null ? list[list.length - 1] : list.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
    const where = at === null ? "" : ` at ${short(near[0])}`;
    return make("span", { style: `color: ${COLOURS[number % COLOURS.length]}` }, `${name} ${short(near[1])}${where}`);
  });
  legend.replaceChildren(...named);
}

function drawGates(gates) {
  const names = ["compressed", "selected", "window"];
  const rows = gates.map(([layer, ...shares]) => {
    const total = shares.reduce((sum, share) => sum + share, 0) || 1;
    const bars = shares.map((share, n) =>
      make("span", { style: `width: ${100 * share / total}%; background: ${COLOURS[n]}`, title: `${names[n]} ${share.toFixed(2)}` }));
    return make("div", { class: "gate" }, make("span", {}, `layer ${layer}`), make("div", {}, ...bars));
  });
  const legend = names.map((name, n) => make("span", { style: `color: ${COLOURS[n]}` }, name));
  return make("div", { class: "box" }, make("h2", {}, "Gates: share of each branch"), ...rows,
    make("div", { class: "legend" }, ...legend));
}

function drawCharts() {
  control("switches").hidden = charts.length === 0;
  control("charts").replaceChildren(...charts.map(drawChart));
}

function drawPhases(phases) {
  const lines = phases.map(([title, verdict, time]) => `${verdict.padEnd(6)} ${title}, judged ${time}`);
  return make("div", { class: "box" }, make("h2", {}, "launch phases"), make("pre", {}, lines.join("\n")));
}

function draw(state) {
  shown = state;
  document.title = `${state.state} · ${state.name}`;
  control("state").textContent = state.state.toUpperCase();
  control("state").className = state.state;
  for (const name of ["name", "headline", "model", "progress"]) control(name).textContent = state[name];
  control("bar").value = state.share;
  control("alerts").replaceChildren(...state.alerts.map(([level, text]) => make("p", { class: level }, text)));
  control("tiles").replaceChildren(...state.tiles.map(([label, text]) =>
    make("div", { class: "box" }, make("span", { class: "dim" }, label), make("b", {}, text))));
  if (state.charts) {
    charts = state.charts;
    drawCharts();
  }
  const panels = state.panels.map(([title, lines]) =>
    make("div", { class: "box" }, make("h2", {}, title), make("pre", {}, lines.join("\n"))));
  if (state.phases.length) panels.unshift(drawPhases(state.phases));
  if (state.gates.length) panels.unshift(drawGates(state.gates));
  control("more").replaceChildren(...panels);
  drawAge();
}

function drawAge() {
  if (!shown) return;
  const age = Math.max(0, Math.round((Date.now() - Date.parse(shown.taken_at)) / 1000));
  control("age").textContent = `as of ${shown.taken_at}` + (age > 5 ? `, ${age} s ago` : "");
  const waits = ["running", "starting", "restarting"].includes(shown.state);
  if (stored && waits && age > STALE_S)
    control("connection").textContent = `this page was not renewed for ${Math.round(age / 60)} minutes: look at the machine`;
}

function drawRuns(runs, chosen) {
  control("runs").replaceChildren(...(runs.length < 2 ? [] : runs.map((run) => {
    const query = new URLSearchParams(location.search);
    query.set("run", run.name);
    const step = run.steps ? `${run.step}/${run.steps}` : run.step;
    return make("a", { href: "?" + query, class: run.name === chosen ? "chosen" : "" }, run.name + " ",
      make("small", { class: run.state }, `${run.state} ${step}`));
  })));
}

function follow() {
  const source = new EventSource("events" + location.search);
  source.addEventListener("state", (event) => { control("connection").textContent = ""; draw(JSON.parse(event.data)); });
  source.addEventListener("runs", (event) => { const { runs, chosen } = JSON.parse(event.data); drawRuns(runs, chosen); });
  source.onerror = () => { control("connection").textContent = "no connection to tamis monitor; trying again"; };
}

// A stored page loads itself again every minute: the switches stay as they are.
control("smoothing").value = sessionStorage.getItem("smoothing") || 0;
control("log").checked = sessionStorage.getItem("log") === "true";
for (const name of ["smoothing", "log"]) control(name).addEventListener("input", () => {
  sessionStorage.setItem("smoothing", control("smoothing").value);
  sessionStorage.setItem("log", control("log").checked);
  drawCharts();
});
setInterval(drawAge, 1000);
if (stored) draw(stored); else follow();
