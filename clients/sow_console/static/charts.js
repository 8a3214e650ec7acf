// The charts of the Server page, drawn by uPlot from the series in `data-chart`, again with each frame of the page.
// @ts-check

/** @typedef {{ title: string, unit: "rate" | "count" | "size" | "time", seconds: number[], series: { label: string, values: (number | null)[] }[] }} Chart */
/** @typedef {{ setData: (data: unknown) => void, setSize: (size: { width: number, height: number }) => void, destroy: () => void }} Plot */

const UPlot = /** @type {{ uPlot: new (options: object, data: unknown, place: Element) => Plot }} */ (/** @type {unknown} */ (globalThis)).uPlot;
const HEIGHT = 130;
const COLOURS = ["--link", "--warn"];
/** @type {Map<Element, { plot: Plot, scheme: string }>} */
const plots = new Map();

/** @param {string} unit @param {number | null | undefined} value */
function shown(unit, value) {
  if (value === null || value === undefined) return "–";
  if (unit === "time") return value < 1_000 ? `${value.toPrecision(3)} ms` : `${(value / 1_000).toPrecision(3)} s`;
  const names = unit === "size" ? ["B", "KiB", "MiB", "GiB", "TiB"] : ["", "k", "M", "G", "T"];
  const step = unit === "size" ? 1_024 : 1_000;
  let number = value, at = 0;
  for (; Math.abs(number) >= step && at < names.length - 1; at += 1) number /= step;
  const text = Number.isInteger(number) ? String(number) : number.toPrecision(3);
  return `${text}${names[at] ? ` ${names[at]}` : ""}${unit === "rate" ? "/s" : ""}`;
}

/** A colour as the canvas knows it: it does not know light-dark(). @param {string} name */
function resolved(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** @param {Element} place */
function draw(place) {
  const chart = /** @type {Chart} */ (JSON.parse(/** @type {HTMLElement} */ (place).dataset["chart"] ?? "{}"));
  const data = [chart.seconds, ...chart.series.map((one) => one.values)];
  const scheme = resolved("--ink");
  const known = plots.get(place);
  if (known && known.scheme === scheme) {
    known.plot.setData(data);
    return;
  }
  known?.plot.destroy();
  const axis = { stroke: resolved("--faint"), grid: { stroke: resolved("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const plot = new UPlot(
    {
      width: Math.max(180, place.clientWidth),
      height: HEIGHT,
      cursor: { sync: { key: "server" }, drag: { x: false, y: false } },
      legend: { live: true },
      scales: { y: { range: (/** @type {unknown} */ _, /** @type {number} */ low, /** @type {number} */ high) => [Math.min(0, low), Math.max(high * 1.1, 1)] } },
      axes: [
        { ...axis, space: 70, size: 26, values: (/** @type {unknown} */ _, /** @type {number[]} */ at) => at.map((one) => new Date(one * 1000).toLocaleTimeString([], { hourCycle: "h23" })) },
        { ...axis, size: 62, values: (/** @type {unknown} */ _, /** @type {number[]} */ at) => at.map((one) => shown(chart.unit, one)) },
      ],
      series: [
        { label: "at", value: (/** @type {unknown} */ _, /** @type {number | null} */ at) => at === null ? "now" : new Date(at * 1000).toLocaleTimeString([], { hourCycle: "h23" }) },
        ...chart.series.map((one, index) => ({
          label: one.label, stroke: resolved(COLOURS[index] ?? "--ink"), width: 1.5, spanGaps: false,
          points: {
            size: 4,
            // A value between two gaps has no line, so it gets a point also where the others have none.
            filter: (/** @type {{ data: (number | null)[][] }} */ plot, /** @type {number} */ at, /** @type {boolean} */ shows) =>
              shows ? null : alone(plot.data[at] ?? []),
          },
          value: (/** @type {{ data: (number | null)[][] }} */ plot, /** @type {number | null} */ value, /** @type {number} */ at, /** @type {number | null} */ index) =>
            shown(chart.unit, index === null ? plot.data[at]?.at(-1) : value),
        })),
      ],
    },
    data,
    place,
  );
  plots.set(place, { plot, scheme });
}

/** @param {(number | null)[]} values */
function alone(values) {
  return values.flatMap((value, at) => value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null ? [at] : []);
}

function all() {
  for (const [place, { plot }] of plots) {
    if (place.isConnected) continue;
    plot.destroy();
    plots.delete(place);
  }
  for (const place of document.querySelectorAll(".chart")) draw(place);
}

const live = document.getElementById("live");
if (live && UPlot) {
  all();
  new MutationObserver(all).observe(live, { subtree: true, attributes: true, attributeFilter: ["data-chart"] });
  addEventListener("resize", () => {
    for (const [place, { plot }] of plots) plot.setSize({ width: Math.max(180, place.clientWidth), height: HEIGHT });
  });
  new MutationObserver(all).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
}
