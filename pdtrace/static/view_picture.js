// A picture's card: drawn, its rows and CSV on demand, requests in it to open.
import { open } from "./view_request.js";

const OPENS = ["request", "victim", "culprit"];
const payloads = new WeakMap();
let config = {};
// What draws comes while the words are there already.
const vega = new Promise((come, fail) => {
  const script = document.createElement("script");
  script.src = "vega.js";
  script.addEventListener("load", come);
  script.addEventListener("error", () => fail(new Error("Vega did not come")));
  document.head.append(script);
});
vega.catch(() => {}); // told where it is missed

export function look(given) { config = given; }

export async function show(place, told) {
  pdtrace.forget(place);
  place.innerHTML = told.html; // escaped where it was made
  const figure = place.querySelector("figure");
  payloads.set(figure, told.payload);
  const names = Object.keys(told.payload.rows.columns).filter((name) => OPENS.includes(name));
  const chart = figure.querySelector(".chart");
  if (names.length && chart && !place.closest("dialog")) {
    const note = document.createElement("p");
    note.className = "note linked";
    note.textContent = "A click on a mark opens its request; so do the ids in the rows below.";
    chart.after(note);
  }
  pdtrace.tellTimes(figure);
  if (!chart) return;
  try {
    await vega;
    if (!chart.isConnected) return;
    await pdtrace.draw(chart, told.payload, config);
  } catch (error) {
    chart.textContent = "This picture could not be drawn: " + error.message;
    console.error(error);
  }
}

// The request that a mark stands for.
function requestOf(datum) {
  for (const name of OPENS) if (typeof datum?.[name] === "string" && datum[name]) return datum[name];
  return datum?.datum ? requestOf(datum.datum) : null;
}
document.addEventListener("pdtrace:drawn", (event) => {
  const view = event.detail.view ?? event.detail;
  view.addEventListener("click", (_, item) => {
    const id = requestOf(item?.datum);
    if (id) open(id);
  });
});

document.addEventListener("toggle", (event) => {
  const figure = event.target.closest?.("figure.picture");
  const rows = figure && event.target.open && event.target.querySelector(".rows");
  if (!rows || rows.hasChildNodes()) return;
  pdtrace.table(rows, payloads.get(figure).rows);
  link(rows);
}, true);
document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button.csv");
  if (button) pdtrace.save(pdtrace.csv(payloads.get(button.closest("figure")).rows), button.dataset.file);
});

// The ids of requests in a table lead to them.
function link(rows) {
  const heads = [...rows.querySelectorAll("th")].map((cell) => cell.textContent);
  heads.forEach((name, n) => {
    if (!OPENS.includes(name)) return;
    for (const cell of rows.querySelectorAll(`tbody td:nth-child(${n + 1})`)) {
      const id = cell.querySelector("button.id")?.dataset.full ?? cell.textContent;
      if (!id) continue;
      const button = document.createElement("button");
      Object.assign(button, { type: "button", className: "request", textContent: cell.textContent, title: id });
      button.dataset.request = id;
      cell.replaceChildren(button);
    }
  });
}
