"use strict";
// The chart of one run: dygraphs computes positions and axes, this file paints the areas and lines.
// In every function `to` is the context of the chart's canvas.

const NAME = 120;  // pixels that the name of a narrow band may take

// The rows that dygraphs expects, one per sample and two per phase of a plan: the time, the upper
// edges of each owner's layer and of the page cache, the promise, and the curves.
function rows_of(run) {
  const { held, total, promise } = run.sums;
  const cache = run.line.page_cache_bytes;
  const rows = run.line.t_s.map((at, i) => {
    let below = 0;
    const layers = run.owners.map((owner) => (below += held[owner][i]));
    const curves = run.curves.map((curve) => curve.bytes[i]);
    return [at, ...layers, total[i] + (cache?.[i] ?? 0), promise[i], ...curves];
  });
  if (!run.has_steps) return rows;
  // Two points per phase, so that the chart has steps: values are constant within a phase.
  return rows.flatMap(([at, ...of]) => [[at, ...of], [at + 1 - 1e-6, ...of]]);
}

function trace(to, points, begins) {
  points.forEach((point, i) => {
    if (i === 0 && begins) to.moveTo(point.canvasx, point.canvasy);
    else to.lineTo(point.canvasx, point.canvasy);
  });
}

function fill_between(to, below, above, style) {
  to.beginPath();
  trace(to, above, true);
  trace(to, [...below].reverse(), false);
  to.closePath();
  to.fillStyle = style;
  to.fill();
}

// A pattern of diagonal lines, for the page cache.
function hatched(to) {
  const tile = element("canvas", "", { width: 8, height: 8 });
  const lines = tile.getContext("2d");
  lines.strokeStyle = color("--muted");
  lines.lineWidth = 1.2;
  for (const shift of [-8, 0, 8]) {
    lines.moveTo(shift - 1, 9);
    lines.lineTo(shift + 9, -1);
  }
  lines.stroke();
  return to.createPattern(tile, "repeat");
}

// Writes text with an outline in the background's color, so that it is legible on any area.
function note(to, text, x, y, align, of) {
  to.setLineDash([]);
  to.font = "13px system-ui, sans-serif";
  to.textAlign = align;
  to.lineWidth = 4;
  to.strokeStyle = color("--back");
  to.strokeText(text, x, y);
  to.fillStyle = of;
  to.fillText(text, x, y);
}

function draw_line(to, points, dash, of) {
  to.beginPath();
  to.strokeStyle = color(of);
  to.lineWidth = 2;
  to.setLineDash(dash);
  let begins = true;  // after a gap
  for (const point of points) {
    const is_gap = Number.isNaN(point.canvasy);
    if (!is_gap && begins) to.moveTo(point.canvasx, point.canvasy);
    else if (!is_gap) to.lineTo(point.canvasx, point.canvasy);
    begins = is_gap;
  }
  to.stroke();
}

function draw_levels(to, area, graph, run) {
  run.levels.filter((level) => level.is_drawn).forEach(({ name, bytes, dash, paint: of }, at) => {
    const y = graph.toDomYCoord(bytes);
    to.strokeStyle = color(of);
    to.lineWidth = 2;
    to.setLineDash(dash);
    to.beginPath();
    to.moveTo(area.x, y);
    to.lineTo(area.x + area.w, y);
    to.stroke();
    const x = at % 2 ? area.x + 6 : area.x + area.w - 6;
    note(to, `${name} ${size(bytes)}`, x, y - 6, at % 2 ? "left" : "right", color(of));
  });
}

function draw_peak(to, area, graph, run) {
  const x = graph.toDomXCoord(run.line.t_s[run.at_peak] + (run.has_steps ? 0.5 : 0));
  const y = graph.toDomYCoord(run.sums.total[run.at_peak]);
  to.setLineDash([]);
  to.beginPath();
  to.arc(x, y, 5, 0, 2 * Math.PI);
  to.fillStyle = color("--text");
  to.fill();
  to.lineWidth = 2;
  to.strokeStyle = color("--back");
  to.stroke();
  const is_right = x < area.x + area.w / 2;
  note(to, "peak", x + (is_right ? 9 : -9), y + 16, is_right ? "left" : "right", color("--text"));
}

// dygraphs calls this for each series; the first call draws all of them.
function draw(run, { seriesIndex, allSeriesPoints, drawingContext: to, plotArea, dygraph }) {
  if (seriesIndex !== 0) return;
  const floor = dygraph.toDomYCoord(0);
  let below = allSeriesPoints[0].map((point) => ({ canvasx: point.canvasx, canvasy: floor }));
  run.owners.forEach((owner, at) => {
    const above = allSeriesPoints[at];
    fill_between(to, below, above, color(paint(owner)));
    to.beginPath();
    trace(to, above, true);
    to.strokeStyle = color("--back");
    to.lineWidth = 1;
    to.setLineDash([]);
    to.stroke();
    below = above;
  });
  if (run.line.page_cache_bytes) {
    fill_between(to, below, allSeriesPoints[run.owners.length], hatched(to));
  }
  const [promise, ...curves] = allSeriesPoints.slice(run.owners.length + 1);
  draw_line(to, promise, [7, 4], "--promise");
  for (const curve of curves) draw_line(to, curve, [2, 2], "--muted");
  draw_levels(to, plotArea, dygraph, run);
  draw_peak(to, plotArea, dygraph, run);
}

function shade_bands(to, area, graph, run) {
  to.fillStyle = color("--shade");
  run.bands.filter((band) => band.row === 0).forEach((band, at) => {
    if (at % 2) return;
    const left = graph.toDomXCoord(band.begin_s);
    to.fillRect(left, area.y, graph.toDomXCoord(band.end_s) - left, area.h);
  });
}

// The names of the phases, above the chart, each within its own band, or up to the next band of its
// row.
function name_bands(run, graph) {
  const area = graph.getArea();
  const strip = run.at.querySelector(".phases");
  const inside = (x) => Math.min(area.x + area.w, Math.max(area.x, x));
  const spans = run.bands.map((band) => {
    const left = inside(graph.toDomXCoord(band.begin_s));
    const right = inside(graph.toDomXCoord(band.end_s));
    const next = Math.min(...run.bands.filter(({ row, begin_s }) =>
      row === band.row && begin_s > band.begin_s).map(({ begin_s }) => begin_s));
    const width = Math.max(right - left, Math.min(inside(graph.toDomXCoord(next)) - left, NAME));
    const span = element("span", width > 20 ? band.name : "", { title: band.name });
    span.hidden = right - left < 1;
    span.style.left = `${left}px`;
    span.style.width = `${width}px`;
    span.style.backgroundSize = `${right - left}px`;
    span.style.top = `${1.4 * band.row}rem`;
    return span;
  });
  strip.style.height = `${1.4 * (1 + Math.max(-1, ...run.bands.map((band) => band.row)))}rem`;
  strip.replaceChildren(...spans);
}

// At most seven ticks, at multiples of a power of two.
function byte_ticks(low, high) {
  let step = 1;
  while ((high - low) / step > 6) step *= 2;
  const ticks = [];
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) {
    const text = size(v).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 ");
    ticks.push({ v, label: v === 0 ? "0" : text });
  }
  return ticks;
}

function make_graph(run, top) {
  return new Dygraph(run.at.querySelector(".chart"), rows_of(run), {
    labels: ["time", ...run.owners.map((owner) => `owner ${owner}`), "page cache", "promise",
             ...run.curves.map((curve) => `curve ${curve.name}`)],
    legend: "never",
    plotter: (e) => draw(run, e),
    underlayCallback: (to, area, graph) => shade_bands(to, area, graph, run),
    drawCallback: (graph) => tell_window(run, graph),
    highlightCallback: (event, x) => choose(run, nearest(run, x)),
    drawHighlightPointCallback: (graph, name, to, x) => {
      const area = graph.getArea();
      to.strokeStyle = color("--text");
      to.beginPath();
      to.moveTo(x, area.y);
      to.lineTo(x, area.y + area.h);
      to.stroke();
    },
    hideOverlayOnMouseOut: false,
    valueRange: [0, top],
    axes: {
      x: {
        drawGrid: false,
        axisLabelFormatter: (at) => `${+at.toFixed(3)} s`,
        ...(run.has_steps && { ticker: () => [] }),
      },
      y: { axisLabelWidth: 66, ticker: byte_ticks },
    },
    gridLineColor: color("--edge"),
    axisLineColor: color("--edge"),
  });
}
