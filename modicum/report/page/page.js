"use strict";
// Draws one chart per run of the document, all on one scale and with one table of owners. Names come
// from processes and files, so they are set as text only, never as HTML.

const CACHE = "page cache";
const FAR = 2;  // a limit above FAR times the peak is written as text, not drawn
const ZOOM = 0.5;  // the part of the visible time that remains after "Zoom in"
const THIN = 0.01;  // owners below this part of the peak are one row of the legend

const page = JSON.parse(document.getElementById("document").textContent);
const OWNERS = page.owners;  // key -> words, in stacking order

const words = (owner) => OWNERS[owner] ?? owner;
const paint = (owner) => `--owner-${owner in OWNERS ? owner : "other"}`;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function size(bytes) {  // as format_size in C++
  if (bytes < 1024) return `${Math.round(bytes)} B`;
  const units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (bytes /= 1024; bytes >= 1024 && unit + 1 < units.length; bytes /= 1024) ++unit;
  return `${bytes.toFixed(2)} ${units[unit]}`;
}

function element(name, text = "", more = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, more);
}

function row(cells, kind = "td") {
  const made = element("tr");
  cells.forEach((cell, at) => {
    const of = cell instanceof Node ? cell : document.createTextNode(cell);
    const box = element(kind === "th" || at === 0 ? "th" : "td");
    if (box.tagName === "TH") box.scope = kind === "th" ? "col" : "row";
    box.append(of);
    made.append(box);
  });
  return made;
}

function fill(table, caption, head, rows) {
  const top = element("thead");
  top.append(row(head, "th"));
  const body = element("tbody");
  body.append(...rows);
  table.replaceChildren(element("caption", caption), top, body);
}

// ---- the memory of a run

// The sums over the processes that are shown, by sample. The promise is null at a sample at which a
// living process that makes promises is in no phase.
function sums(run, shown = run.shown) {
  const n = run.line.t_s.length;
  const held = Object.fromEntries(run.owners.map((owner) => [owner, new Array(n).fill(0)]));
  const total = new Array(n).fill(0);
  const promise = new Array(n).fill(null);
  const is_whole = new Array(n).fill(true);
  run.line.tracks.forEach((track, at) => {
    if (!shown[at]) return;
    for (const [owner, values] of Object.entries(track.owners)) {
      values.forEach((bytes, i) => {
        const counted = Math.max(0, bytes ?? 0);
        if (counted > 0) held[owner][i] += counted;
        total[i] += counted;
      });
    }
    const owned = Object.values(track.owners);
    track.promise_bytes?.forEach((bytes, i) => {
      if (bytes !== null) promise[i] += bytes;
      else if (owned.some((values) => values[i] !== null)) is_whole[i] = false;
    });
  });
  return { held, total, promise: promise.map((bytes, i) => (is_whole[i] ? bytes : null)) };
}

function index_of_highest(values) {
  return values.reduce((best, value, at) => (value > values[best] ? at : best), 0);
}

// The phases of all processes as bands: overlapping phases of one name become one band. Bands that
// overlap by more than a quarter of the shorter one are in different rows.
function bands_of(phases) {
  const bands = [];
  const latest = new Map();  // by name
  for (const of of [...phases].sort((a, b) => a.begin_s - b.begin_s)) {
    const same = latest.get(of.name);
    if (same && of.begin_s <= same.end_s) {
      same.end_s = Math.max(same.end_s, of.end_s);
    } else {
      bands.push({ name: of.name, begin_s: of.begin_s, end_s: of.end_s });
      latest.set(of.name, bands[bands.length - 1]);
    }
  }
  const last = [];  // the last band of each row
  for (const band of bands) {
    // Ranks begin a phase at slightly different times, so that bands overlap for a short time.
    const is_free = (before) =>
      before.end_s - band.begin_s <= 0.25 * Math.min(
        before.end_s - before.begin_s, band.end_s - band.begin_s);
    const free = last.findIndex(is_free);
    band.row = free < 0 ? last.length : free;
    if (free >= 0) last[free].end_s = Math.min(last[free].end_s, band.begin_s);
    last[band.row] = band;
  }
  return bands;
}

// Sample i in words: its time and innermost phase. In a plan a sample is a phase.
function when(run, i) {
  const at = run.line.t_s[i];
  if (run.has_steps) return run.bands[i]?.name ?? `phase ${i + 1}`;
  const inside = run.bands.filter((band) => band.begin_s <= at && at <= band.end_s);
  const phase = inside.length ? `, phase ${inside[inside.length - 1].name}` : "";
  return `${at.toFixed(2)} s${phase}`;
}

// One line with the amounts at sample i, of the processes that are shown.
function reading(run, i) {
  const { held, total, promise } = run.sums;
  const parts = run.owners.filter((owner) => held[owner][i] > 0)
    .sort((a, b) => held[b][i] - held[a][i])
    .map((owner) => `${words(owner)} ${size(held[owner][i])}`);
  let text = `${when(run, i)}: ${size(total[i])} held`;
  if (parts.length) text += ` (${parts.join(", ")})`;
  if (promise[i] !== null) text += `; predicted ${size(promise[i])}`;
  if (run.line.page_cache_bytes) text += `; page cache ${size(run.line.page_cache_bytes[i])}`;
  for (const curve of run.curves) text += `; ${curve.name} ${size(curve.bytes[i] ?? 0)}`;
  return text;
}

// ---- hovering, zooming, choosing

// The index of the sample nearest to time x.
function nearest(run, x) {
  const times = run.line.t_s;
  if (run.has_steps) return Math.min(times.length - 1, Math.max(0, Math.floor(x)));
  return times.reduce((best, at, i) => (Math.abs(at - x) < Math.abs(times[best] - x) ? i : best), 0);
}

function choose(run, i) {
  run.at.querySelector(".sample input").value = i;
  run.at.querySelector(".sample input").setAttribute("aria-valuetext", when(run, i));
  run.at.querySelector(".reading").textContent = reading(run, i);
  run.chosen = i;
}

// Zooms to [begin, end], shifted and shortened to fit the run.
function show_window(run, begin, end) {
  const [first, last] = run.graph.xAxisExtremes();
  const width = Math.min(end - begin, last - first);
  begin = Math.min(Math.max(begin, first), last - width);
  run.graph.updateOptions({ dateWindow: [begin, begin + width] });
}

// Writes which part of the run is visible, and moves the phases' names to match.
function tell_window(run, graph) {
  name_bands(run, graph);
  const [begin, end] = graph.xAxisRange();
  const text = run.has_steps ? "" : `${begin.toFixed(2)} to ${end.toFixed(2)} s`;
  run.at.querySelector(".window").textContent = graph.isZoomed("x") ? `zoomed: ${text}` : text;
}

// The actions of the buttons, by their names. The visible time is [begin, end].
const MOVES = {
  in: (run, begin, end) => {
    const at = run.line.t_s[run.chosen];
    const middle = at >= begin && at <= end ? at : (begin + end) / 2;
    const half = (end - begin) * ZOOM / 2;
    show_window(run, middle - half, middle + half);
  },
  out: (run, begin, end) => {
    const more = (end - begin) * (1 / ZOOM - 1) / 2;
    show_window(run, begin - more, end + more);
  },
  back: (run, begin, end) => show_window(run, begin - (end - begin) / 2, end - (end - begin) / 2),
  on: (run, begin, end) => show_window(run, begin + (end - begin) / 2, end + (end - begin) / 2),
  reset: (run) => {
    run.at.querySelector("select").value = "";
    run.graph.resetZoom();
  },
};

function listen(run) {
  for (const [name, move] of Object.entries(MOVES)) {
    const button = run.at.querySelector(`[name=${name}]`);
    button.addEventListener("click", () => move(run, ...run.graph.xAxisRange()));
  }
  const phases = run.at.querySelector("select");
  phases.append(element("option", "all", { value: "" }));
  run.bands.forEach((band, at) => phases.append(element("option", band.name, { value: at })));
  phases.addEventListener("change", () => {
    if (phases.value === "") return run.graph.resetZoom();
    const band = run.bands[phases.value];
    show_window(run, band.begin_s, Math.max(band.end_s, band.begin_s + 1e-3));
  });
  const slider = run.at.querySelector(".sample input");
  slider.max = run.line.t_s.length - 1;
  slider.addEventListener("input", () => {
    const i = Number(slider.value);
    const at = run.line.t_s[i];
    const [begin, end] = run.graph.xAxisRange();
    if (at < begin || at > end) show_window(run, at - (end - begin) / 2, at + (end - begin) / 2);
    choose(run, i);
    run.graph.setSelection(run.has_steps ? 2 * i : i);
  });
  for (const [name, fill_it] of [["samples", fill_samples], ["intervals", fill_phases]]) {
    const details = run.at.querySelector(`.${name}`);
    details.addEventListener("toggle", () => details.open && fill_it(run));
  }
}

// Draws the run again after a change of run.shown.
function show_processes(run) {
  run.sums = sums(run);
  run.graph.updateOptions({ file: rows_of(run) });
  choose(run, run.chosen);
  if (run.at.querySelector(".samples").open) fill_samples(run);
}

// ---- tables

function box(text, is_checked, change) {
  const label = element("label");
  const input = element("input", "", { type: "checkbox", checked: is_checked });
  input.addEventListener("change", () => change(input.checked));
  label.append(input, ` ${text}`);
  return label;
}

function fill_processes(run) {
  const tracks = run.line.tracks;
  const has_pids = tracks.some((track) => track.pid);
  const boxes = tracks.map((track, at) => box(track.label, true, (is_checked) => {
    run.shown[at] = is_checked;
    all.querySelector("input").checked = run.shown.every(Boolean);
    show_processes(run);
  }));
  const all = box("all of them", true, (is_checked) => {
    run.shown.fill(is_checked);
    boxes.forEach((label) => (label.querySelector("input").checked = is_checked));
    show_processes(run);
  });
  const whole = sums(run);
  const line_of = (label, who, total, huge) => row(
    [label, ...who, size(total[run.at_peak]), size(Math.max(...total)), ...(has_huge ? [huge] : [])]);
  const in_huge_pages = new Map(
    (run.document.processes ?? []).map((one) => [one.pid, one.huge_page_bytes]));
  const has_huge = [...in_huge_pages.values()].some((bytes) => bytes > 0);
  const rows = tracks.map((track, at) => {
    const alone = sums(run, tracks.map((_, other) => other === at));
    const bytes = in_huge_pages.get(track.pid);
    return line_of(boxes[at], has_pids ? [track.pid || "", track.rank ?? ""] : [], alone.total,
                   bytes == null ? "" : size(bytes));
  });
  rows.push(line_of(all, has_pids ? ["", ""] : [], whole.total, ""));
  const head = ["shown", ...(has_pids ? ["pid", "rank"] : []), "at the peak", "highest",
                ...(has_huge ? ["most in huge pages"] : [])];
  fill(run.at.querySelector(".processes table"), "Processes", head, rows);
}

function swatch(kind, of) {
  const made = element("span", "", { className: `swatch ${kind}` });
  if (kind === "line") made.style.borderTop = of;
  else if (kind === "") made.style.background = `var(${paint(of)})`;
  return made;
}

function named(mark, text) {
  const made = element("span");
  made.append(mark, text);
  return made;
}

// The owners of all runs, and among them those whose areas are too thin to be seen in any chart.
function owners_in_legend(runs) {
  const owners = ordered(new Set(runs.flatMap((run) => run.owners))).reverse();
  const most = Math.max(...runs.flatMap((run) => run.sums.total));
  const is_thin = (owner) =>
    runs.every((run) => Math.max(0, ...(run.sums.held[owner] ?? [])) < THIN * most);
  const thin = owners.filter(is_thin);
  return { owners, thin: thin.length > 1 ? thin : [] };
}

// The legend of all charts, without rows of 0 B.
function fill_owners(runs) {
  const { owners, thin } = owners_in_legend(runs);
  const is_one = runs.length === 1;
  const head = ["owner", ...runs.map((run) => (is_one ? "at the peak" : `${run.name}, at its peak`))];
  if (is_one) head.push("highest");
  const line_of = (mark, text, values_of) => {
    const values = runs.map((run) => values_of(run) ?? []);
    const highest = values.map((of) => Math.max(0, ...of));
    if (highest.every((bytes) => bytes === 0)) return null;
    const cells = values.map((of, at) => {
      const bytes = of[runs[at].at_peak];
      if (bytes || !highest[at]) return bytes ? size(bytes) : "";
      return is_one ? "" : `up to ${size(highest[at])}`;  // another moment than the peak
    });
    if (is_one) cells.push(size(highest[0]));
    return row([named(mark, text), ...cells]);
  };
  const rows = owners.filter((owner) => !thin.includes(owner)).map((owner) =>
    line_of(swatch("", owner), words(owner), (run) => run.sums.held[owner]));
  if (thin.length) {
    const sum = (run) => run.sums.total.map((_, i) =>
      thin.reduce((bytes, owner) => bytes + (run.sums.held[owner]?.[i] ?? 0), 0));
    rows.push(line_of("", `${thin.length} owners, each below 1 %`, sum));
  }
  rows.unshift(line_of("", "all of it", (run) => run.sums.total));
  if (runs.some((run) => run.line.page_cache_bytes)) {
    rows.unshift(line_of(swatch("cache"), CACHE, (run) => run.line.page_cache_bytes));
  }
  if (runs.some((run) => run.sums.promise.some((bytes) => bytes !== null))) {
    const mark = swatch("line", "3px dashed var(--promise)");
    rows.unshift(line_of(mark, "predicted", (run) => run.sums.promise));
  }
  for (const name of new Set(runs.flatMap((run) => run.curves.map((curve) => curve.name)))) {
    const of = (run) => run.curves.find((curve) => curve.name === name)?.bytes;
    rows.unshift(line_of(swatch("line", "3px dotted var(--muted)"), name, of));
  }
  fill(document.querySelector("#owners table"), "Bytes by owner", head, rows.filter(Boolean));
}

function fill_samples(run) {
  const { held, total, promise } = run.sums;
  const cache = run.line.page_cache_bytes;
  const head = [run.has_steps ? "phase" : "time", "held", ...run.owners.map(words)];
  if (cache) head.push(CACHE);
  const is_promised = promise.some((bytes) => bytes !== null);
  if (is_promised) head.push("predicted");
  head.push(...run.curves.map((curve) => curve.name));
  const rows = run.line.t_s.map((at, i) => {
    const cells = [when(run, i), size(total[i]), ...run.owners.map((of) => size(held[of][i]))];
    if (cache) cells.push(size(cache[i]));
    if (is_promised) cells.push(promise[i] === null ? "" : size(promise[i]));
    return row([...cells, ...run.curves.map((curve) => size(curve.bytes[i] ?? 0))]);
  });
  fill(run.at.querySelector(".samples table"), "Samples of the processes shown", head, rows);
}

function fill_phases(run) {
  const rows = run.line.phases.map((of) => {
    const inside = run.sums.total.filter((_, i) =>
      of.begin_s <= run.line.t_s[i] && run.line.t_s[i] <= of.end_s);
    const who = of.rank === null ? `pid ${of.pid}` : `rank ${of.rank}`;
    return row([of.name, who, `${of.begin_s.toFixed(2)} s`, `${of.end_s.toFixed(2)} s`,
                inside.length ? size(Math.max(...inside)) : ""]);
  });
  const head = ["phase", "process", "from", "to", "most held by all"];
  fill(run.at.querySelector(".intervals table"), "Phases", head, rows);
}

// ---- the page

function ordered(owners) {
  const known = Object.keys(OWNERS).filter((owner) => owners.has(owner));
  return [...known, ...[...owners].filter((owner) => !(owner in OWNERS)).sort()];
}

// The command, without the program's directories; empty if there is none.
function command_of({ command }) {
  if (!command?.length) return "";
  return [command[0].split("/").pop(), ...command.slice(1)].join(" ");
}

// The command of a run, or how else the run is called.
function name_of({ document, label }) {
  return document.command?.join(" ") === label ? command_of(document) : label;
}

// A run of the document with the values that are derived from it. `line` is its timeline. start()
// adds `at`, its section of the page, and `graph`.
function run_of(of) {
  const line = of.document.timeline;
  const run = { document: of.document, name: name_of(of), line, chosen: 0,
                has_steps: line.axis === "phases" };
  run.shown = line.tracks.map(() => true);
  const holding = line.tracks.flatMap((track) => Object.entries(track.owners))
    .filter(([, values]) => values.some((bytes) => bytes > 0));
  run.owners = ordered(new Set(holding.map(([owner]) => owner)));
  run.bands = bands_of(line.phases);
  run.sums = sums(run);
  run.at_peak = index_of_highest(run.sums.total);
  run.curves = line.curves ?? [];  // of memory outside of the processes, such as a device's
  const most = Math.max(...run.sums.total, ...run.sums.promise,
                        ...run.curves.flatMap((curve) => curve.bytes));
  run.levels = [{ name: "limit", bytes: line.limit_bytes, dash: [], paint: "--limit" },
                { name: "budget", bytes: line.budget_bytes }, ...(line.levels ?? [])]
    .filter((level) => level.bytes != null)
    .map((level) => ({ dash: [2, 3], paint: "--budget", is_drawn: level.bytes <= FAR * most,
                       ...level }));
  const drawn = run.levels.filter((level) => level.is_drawn).map((level) => level.bytes);
  const cached = line.page_cache_bytes?.map((bytes, i) => bytes + run.sums.total[i]) ?? [];
  // The top of the chart. Page cache far above everything else is cut off.
  run.top = 1.1 * Math.max(most, ...drawn, ...cached.filter((bytes) => bytes <= FAR * most), 1);
  return run;
}

// Writes the heading of a run, its peak, and its limits and budgets.
function tell(run) {
  run.at.querySelector("h2").textContent = run.name;
  const command = command_of(run.document);
  run.at.querySelector(".command").textContent = command === run.name ? "" : command;
  const { bytes, at_s, cause } = run.document.peak ?? {};
  const peak = bytes ?? run.sums.total[run.at_peak];
  const at = run.has_steps ? "" : ` after ${(at_s ?? run.line.t_s[run.at_peak]).toFixed(2)} s`;
  const text = `Peak ${size(peak)}${at}${cause ? `: ${cause}` : ""}`;
  run.at.querySelector(".peak").textContent = text;
  const lines = run.levels.map(({ name, bytes: of, is_drawn }) =>
    `${name} ${size(of)}${is_drawn ? "" : " (above the chart)"}`);
  const waited = run.document.pressure;
  if (waited?.some_s > 0) {
    lines.push(`waited for memory ${waited.some_s.toFixed(2)} s, all processes at once ` +
               `${waited.full_s.toFixed(2)} s (${waited.source})`);
  }
  run.at.querySelector(".lines").textContent = lines.join(", ");
  const chart = run.at.querySelector(".chart");
  chart.setAttribute("aria-label", `Memory by owner: ${run.name}. ${text}`);
  for (const [name, label] of [["processes", "Processes"], ["samples .scroll", "Samples"],
                               ["intervals .scroll", "Phases"]]) {
    run.at.querySelector(`.${name}`).setAttribute("aria-label", `${label}: ${run.name}`);
  }
}

// The facts above the charts, and the tables below them.
function fill_text() {
  document.getElementById("sentence").textContent = page.sentence;
  for (const [name, value] of Object.entries(page.facts)) {
    const fact = element("div");
    fact.append(element("dt", name), element("dd", value));
    document.getElementById("facts").append(fact);
  }
  for (const { caption, head, rows } of page.tables) {
    const scroll = element("div", "", { className: "scroll", tabIndex: 0, role: "region" });
    scroll.setAttribute("aria-label", caption);
    const table = element("table");
    fill(table, caption, head, rows.map((cells) => row(cells)));
    scroll.append(table);
    document.getElementById("tables").append(scroll);
  }
}

function start() {
  fill_text();
  const runs = page.runs.map(run_of);
  const top = Math.max(...runs.map((run) => run.top));
  const place = document.getElementById("runs");
  place.classList.toggle("several", runs.length > 1);
  for (const run of runs) {
    place.append(document.getElementById("run").content.cloneNode(true));
    run.at = place.lastElementChild;
    tell(run);
    if (!run.line.t_s.length) {  // the command ended before the first sample
      run.at.replaceChildren(run.at.querySelector("h2"), element("p", "There is no sample."));
      continue;
    }
    run.graph = make_graph(run, top);
    listen(run);
    fill_processes(run);
    choose(run, run.at_peak);
  }
  fill_owners(runs);
  if (runs.length === 1) runs[0].at.querySelector(".tables")?.prepend(document.getElementById("owners"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const run of runs) {
      run.graph?.updateOptions({ gridLineColor: color("--edge"), axisLineColor: color("--edge") });
    }
  });
  return runs;
}

const shown_runs = start();
