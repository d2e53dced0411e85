// The live page: asks for what the address chooses and shows it; what is not wanted any more is broken off.
import { address, ask, onChange, selection } from "./view_state.js";
import { deployments, filters, limits } from "./view_filters.js";
import { look, show } from "./view_picture.js";
import { follow } from "./view_request.js";

const byId = (id) => document.getElementById(id);
const root = document.documentElement;
const AT_ONCE = 3;
pdtrace.options.ast = true; // no eval: the page's policy forbids it
pdtrace.options.styles = false; // nor styles that a script writes

// --- colours, zone, link
const theme = byId("theme");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
function nameTheme() {
  theme.textContent = dark() ? "light" : "dark";
  theme.ariaLabel = `switch to ${theme.textContent} colours`;
}
theme.addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  try { localStorage.setItem("pdtrace-theme", root.dataset.theme); } catch { /* private window */ }
  nameTheme();
});
nameTheme();

const zone = byId("zone");
let utc = false;
const clock = (moment) => new Intl.DateTimeFormat("sv-SE", {
  dateStyle: "short", timeStyle: "medium", timeZone: utc ? "UTC" : undefined,
}).format(moment);
zone.addEventListener("click", () => {
  utc = !utc;
  zone.setAttribute("aria-pressed", String(utc));
  zone.textContent = utc ? "local time" : "UTC";
  pdtrace.zone(utc);
  if (told) filters(told, clock);
});
byId("copy").addEventListener("click", () => pdtrace.copy(location.href));
byId("filters").open = matchMedia("(min-width: 901px)").matches;

// --- what is shown
let overview, told, shown = null, running;

async function refresh() {
  const key = selection().toString();
  if (key === shown) return;
  shown = key;
  running?.abort();
  running = new AbortController();
  const { signal } = running;
  root.dataset.state = "asking";
  byId("problem").hidden = true;
  for (const part of document.querySelectorAll("#opening, #closing, #pictures figure")) part.setAttribute("aria-busy", "true");
  try {
    const absent = new Map();
    await several([
      async () => { told = await ask("choices", { signal }); filters(told, clock); },
      async () => answer(await ask("diagnosis", { signal })),
      ...overview.views.map((view) => async () => {
        const picture = await ask("view", { signal, name: view.name });
        if (!signal.aborted) await place(view, picture, absent);
      }),
      () => slowest(signal),
    ], signal);
    if (!signal.aborted) { missing(absent); root.dataset.state = "ready"; }
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    running.abort();
    byId("problem").textContent = error instanceof TypeError ? "pdtrace does not answer; does it still run?" : error.message;
    byId("problem").hidden = false;
    root.dataset.state = "failed";
  }
}

// Some of the work at a time, in order.
async function several(work, signal) {
  const todo = [...work];
  await Promise.all(Array.from({ length: AT_ONCE }, async () => {
    while (todo.length && !signal.aborted) await todo.shift()();
  }));
}

function answer({ opening, closing }) {
  for (const [id, html] of [["opening", opening], ["closing", closing]]) {
    const part = byId(id);
    part.innerHTML = html; // escaped where it was made
    part.removeAttribute("aria-busy");
    pdtrace.tellTimes(part);
  }
}

async function place(view, picture, absent) {
  const slot = document.querySelector(`[data-view="${view.name}"]`);
  if (picture.there) return show(slot, picture);
  pdtrace.forget(slot);
  slot.replaceChildren();
  absent.set(view.name, picture);
}

function missing(absent) {
  const list = overview.views.filter((view) => absent.has(view.name)).map((view) => {
    const { problem } = absent.get(view.name);
    const line = document.createElement("li");
    line.textContent = `${view.title} (${view.question})` + (problem ? `: could not be made: ${problem}` : "");
    return line;
  });
  const part = byId("absent");
  part.hidden = !list.length;
  part.querySelector("ul").replaceChildren(...list);
}

async function slowest(signal) {
  const { html, shown: rows } = await ask("requests", { signal, order: byId("order").value });
  byId("slowest").hidden = !html;
  byId("slowest-rows").innerHTML = html; // escaped where it was made
  byId("slowest-note").textContent = `the first ${rows}`;
  pdtrace.tellTimes(byId("slowest-rows"));
}
byId("order").addEventListener("change", () => slowest(running.signal).catch(() => {}));

// On paper everything is open.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details.finding-more:not([open])")];
  for (const part of opened) part.open = true;
});
addEventListener("afterprint", () => { for (const part of opened) part.open = false; });

async function start() {
  try {
    overview = await ask("overview", { chosen: new URLSearchParams() });
  } catch (error) {
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
    return;
  }
  look(overview.config);
  document.title = `pdtrace: ${overview.title}`;
  byId("title").textContent = overview.title;
  byId("version").textContent = overview.version;
  byId("pictures").replaceChildren(...overview.views.map((view) => {
    const slot = document.createElement("div");
    slot.dataset.view = view.name;
    return slot;
  }));
  const tell = [deployments(overview.deployments), limits(overview)];
  onChange(() => { for (const show of tell) show(); refresh(); follow(); });
  refresh();
  if (address().has("request")) follow();
}
start();
