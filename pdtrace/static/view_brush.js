// The time brush: arrivals as bars, a stretch chosen by dragging or with the arrow keys.
import { address, change } from "./view_state.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600, HEIGHT = 64;
let shown = null; // {start_ms, width_ms, all, chosen}
let range = [0, 0]; // in stretches, the end exclusive
let waiting;

const make = (name, attributes) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};
const instant = (place) => new Date(shown.start_ms + place * shown.width_ms);
const place = (text, otherwise) => {
  const ms = Date.parse(text || "");
  return isNaN(ms) ? otherwise : Math.max(0, Math.min(shown.all.length, (ms - shown.start_ms) / shown.width_ms));
};

export function brush(root, words, arrivals, clock) {
  shown = arrivals;
  const given = address();
  const n = arrivals.all.length;
  range = [place(given.get("from"), 0), place(given.get("until"), n)];
  const most = Math.max(1, ...arrivals.all);
  const focused = root.contains(document.activeElement) ? document.activeElement.id : "";
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "group", "aria-label": "when requests started" });
  const wide = WIDTH / n;
  for (const [kind, counts] of [["all", arrivals.all], ["chosen", arrivals.chosen]]) {
    let path = "";
    counts.forEach((count, bin) => {
      if (!count) return;
      const high = Math.max(1.5, (HEIGHT - 8) * count / most);
      path += `M${(bin * wide).toFixed(2)} ${HEIGHT}v${(-high).toFixed(2)}h${(wide * .86).toFixed(2)}V${HEIGHT}z`;
    });
    svg.append(make("path", { d: path, class: `bar-${kind}` }));
  }
  svg.append(make("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }));
  const area = make("rect", { class: "range", y: 0, height: HEIGHT });
  const edges = ["start", "end"].map((name, side) => make("rect", {
    class: "edge", id: `brush-${name}`, y: 0, width: 6, height: HEIGHT, tabindex: 0, role: "slider",
    "aria-label": side ? "until" : "from", "aria-valuemin": 0, "aria-valuemax": n,
  }));
  svg.append(area, ...edges);

  function place_all() {
    const chosen = range[0] > 0 || range[1] < n;
    area.setAttribute("x", range[0] * wide);
    area.setAttribute("width", chosen ? Math.max(0, (range[1] - range[0]) * wide) : 0);
    edges.forEach((edge, side) => {
      edge.setAttribute("x", Math.max(0, Math.min(WIDTH - 6, range[side] * wide - (side ? 6 : 0))));
      edge.setAttribute("aria-valuenow", Math.round(range[side]));
      edge.setAttribute("aria-valuetext", clock(instant(range[side])));
    });
    words.textContent = `${clock(instant(range[0]))} to ${clock(instant(range[1]))}` +
      (chosen ? "" : ": drag over the bars, or move the ends with the arrow keys");
  }
  function commit() {
    change((query) => {
      if (range[0] > 0) query.set("from", instant(range[0]).toISOString()); else query.delete("from");
      if (range[1] < n) query.set("until", instant(range[1]).toISOString()); else query.delete("until");
    });
  }

  let from = null;
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.max(0, Math.min(n, (event.clientX - box.left) / box.width * n));
  };
  svg.addEventListener("pointerdown", (event) => {
    const side = edges.indexOf(event.target);
    from = side < 0 ? at(event) : range[1 - side];
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = at(event);
    range = [Math.floor(Math.min(from, to)), Math.ceil(Math.max(from, to))];
    place_all();
  });
  svg.addEventListener("pointerup", (event) => {
    if (from === null) return;
    if (Math.abs(at(event) - from) < .5) range = [0, n]; // a click: everything
    from = null;
    place_all();
    commit();
  });
  svg.addEventListener("pointercancel", () => { from = null; });
  edges.forEach((edge, side) => edge.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -n, End: n }[event.key];
    if (event.key === "Escape") range = [0, n];
    else if (step === undefined) return;
    else {
      const moved = Math.max(0, Math.min(n, Math.round(range[side]) + step));
      range[side] = side ? Math.max(moved, Math.floor(range[0]) + 1) : Math.min(moved, Math.ceil(range[1]) - 1);
    }
    event.preventDefault();
    place_all();
    clearTimeout(waiting);
    waiting = setTimeout(commit, 350);
  }));
  place_all();
  root.replaceChildren(svg);
  if (focused) document.getElementById(focused)?.focus();
}
