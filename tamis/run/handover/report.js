// Draws the charts of a report. `charts`, `clock` and `tokensPerStep` come from report.py.
const dark = matchMedia("(prefers-color-scheme: dark)");

function hoursAt(step) {
  let low = 0, high = clock.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (clock[middle][0] < step) low = middle + 1; else high = middle;
  }
  return clock.length ? clock[low][1] : step;
}

const AXES = {
  step: {of: step => step, title: "step"},
  tokens: {of: step => step * tokensPerStep, title: "tokens"},
  hours: {of: hoursAt, title: "hours of training"},
};

function traces(chart, axis, share) {
  return chart.data.map(trace => ({
    ...trace,
    x: chart.over === "step" ? trace.x.map(axis.of) : trace.x,
    y: trace.mode === "lines" ? smoothed(trace.y, share) : trace.y,
  }));
}

function layout(chart, axis) {
  const ink = dark.matches ? "#e6e8ec" : "#1d2433", grid = dark.matches ? "#333a46" : "#e6e8ec";
  const narrow = innerWidth < 700, marks = chart.layout.shapes || [];
  const moved = item => ({...item, ...("x0" in item ? {x0: axis.of(item.x0), x1: axis.of(item.x1)} : {x: axis.of(item.x)})});
  return {
    ...chart.layout,
    xaxis: {...chart.layout.xaxis, gridcolor: grid, title: {text: chart.over === "step" ? axis.title : chart.over}},
    yaxis: {...chart.layout.yaxis, gridcolor: grid, zerolinecolor: grid,
      type: isLog(chart.positive) ? "log" : "linear"},
    shapes: marks.map(moved), annotations: (chart.layout.annotations || []).map(moved),
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: ink, size: narrow ? 11 : 12},
    legend: {orientation: "h", y: narrow ? -0.32 : -0.25, font: {size: 11}},
  };
}

function draw() {
  const axis = AXES[control("axis").value], share = smoothingShare();
  charts.forEach((chart, number) => Plotly.react("chart" + number, traces(chart, axis, share), layout(chart, axis),
    {responsive: true, displaylogo: false, displayModeBar: false}));
}

if (!tokensPerStep) control("axis").querySelector("[value=tokens]").remove();
if (!clock.length) control("axis").querySelector("[value=hours]").remove();
["axis", "smoothing", "log"].forEach(name => control(name).addEventListener("input", draw));
dark.addEventListener("change", draw);
draw();
