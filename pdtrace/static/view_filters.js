// The filters: what can be chosen, how many requests each choice has, what is chosen now.
import { address, change, clear, toggle } from "./view_state.js";
import { brush } from "./view_brush.js";

const INSTANT = /\d{4}-\d\d-\d\dT[\d:.]+Z/; // in the reader's zone, as all times
const FIRST = 7; // choices that are shown at once
const ATTRIBUTES = {
  worker: "worker", model: "model", tenant: "tenant", prompt: "prompt tokens", output: "answer tokens", slo: "limits",
};
const KEYS = { slo: "state" };
const RANGES = new Set(["prompt", "output"]);
const byId = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en");
const make = (name, properties = {}, ...inside) => {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...inside);
  return element;
};

export function filters(told, clock) {
  chips(told, clock);
  byId("time").hidden = !told.arrivals;
  if (told.arrivals) brush(byId("brush"), byId("brush-words"), told.arrivals, clock);
  attributes(told.attributes);
  byId("filters-short").textContent = told.conditions.length ? `${told.conditions.length} set` : "none set";
}

// How many requests are shown, and what chose them; a click on a condition drops it.
function chips(told, clock) {
  const { all, chosen, unknown } = told.counts;
  const parts = [told.conditions.length
    ? make("span", {}, make("strong", { textContent: count(chosen) }), ` of ${count(all)} requests`)
    : make("span", {}, make("strong", { textContent: count(all) }), all === 1 ? " request" : " requests")];
  if (unknown && told.conditions.length) {
    parts.push(make("span", { textContent: `(of ${count(unknown)} it cannot be told: left out)` }));
  }
  for (const { text: said, key } of told.conditions) {
    const text = said.replace(INSTANT, (iso) => clock(new Date(iso)));
    parts.push(make("button", {
      type: "button", className: "chip", textContent: text, ariaLabel: `drop the filter: ${text}`,
      onclick: () => change((given) => given.delete(key)),
    }));
  }
  if (told.conditions.length > 1) {
    parts.push(make("button", { type: "button", textContent: "clear all", onclick: () => change(clear) }));
  }
  byId("selection").replaceChildren(...parts);
}

function attributes(found) {
  const focused = document.activeElement?.id;
  const opened = new Set([...document.querySelectorAll("#attributes details[open]")].map((part) => part.id));
  const sets = [];
  for (const [attribute, title] of Object.entries(ATTRIBUTES)) {
    const values = found[attribute] || [];
    const key = KEYS[attribute] || attribute;
    if (values.length < 2 && !address().has(key)) continue; // nothing to choose
    const rows = values.map((value, n) => row(attribute, key, value, n));
    if (RANGES.has(attribute)) rows.unshift(...any(attribute, values));
    const shown = rows.splice(0, FIRST);
    const set = make("fieldset", { id: `set-${attribute}` }, make("legend", { textContent: title }), ...shown);
    if (rows.length) {
      const more = make("details", { className: "more", id: `more-${attribute}` }, make("summary", { textContent: `${rows.length} more` }), ...rows);
      more.open = opened.has(more.id) || rows.some((one) => one.querySelector("input").checked);
      set.append(more);
    }
    sets.push(set);
  }
  byId("attributes").replaceChildren(...sets);
  if (focused && focused.startsWith("choice-")) byId(focused)?.focus();
}

function row(attribute, key, value, n) {
  const range = RANGES.has(attribute);
  const text = value.value ?? (range ? "unknown" : "");
  const input = make("input", {
    type: range ? "radio" : "checkbox", name: key, id: `choice-${attribute}-${n}`, value: text,
    checked: address().getAll(key).includes(text),
    onchange: () => range ? change((given) => given.set(key, text)) : toggle(key, text, input.checked),
  });
  const part = make("span", { className: "fill" });
  part.style.width = `${100 * value.chosen / Math.max(1, value.all)}%`;
  const amount = value.chosen === value.all ? count(value.all) : `${count(value.chosen)} of ${count(value.all)}`;
  return make("label", { className: "choice", htmlFor: input.id, title: value.value ?? "" },
    input, make("span", { className: "name", textContent: value.label }),
    make("span", { className: "count", textContent: amount }), make("span", { className: "part", ariaHidden: "true" }, part));
}

// Any length, and a range of the address that is none of the bands.
function any(attribute, values) {
  const now = address().get(attribute);
  const known = values.some((value) => (value.value ?? "unknown") === now);
  const option = (id, text, value, checked) => {
    const input = make("input", {
      type: "radio", name: attribute, id, checked,
      onchange: () => change((given) => { if (value) given.set(attribute, value); else given.delete(attribute); }),
    });
    return make("label", { className: "choice", htmlFor: id }, input, make("span", { className: "name", textContent: text }));
  };
  const found = [option(`choice-${attribute}-any`, "any", "", !now)];
  if (now && !known) found.push(option(`choice-${attribute}-own`, now, now, true));
  return found;
}

export function deployments(list) {
  const select = byId("deployment");
  byId("deployment-line").hidden = list.length < 2;
  select.replaceChildren(...list.map((one) => make("option", { value: one.id, textContent: `${one.name} (${count(one.requests)})` })));
  const show = () => { select.value = address().get("deployment") || list[0]?.id || ""; };
  // Another deployment has other workers and times: its filters start anew.
  select.onchange = () => change((given) => { clear(given); given.set("deployment", select.value); });
  show();
  return show;
}

export function limits(overview) {
  const input = byId("slo");
  const show = () => { input.value = address().get("slo") || ""; };
  byId("slo-note").textContent = overview.limits.length
    ? `Without a value here the classes given at the start hold: ${overview.limits.join(", ")}.` : "";
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    change((given) => {
      const text = input.value.trim();
      if (text) given.set("slo", text);
      else { given.delete("slo"); if (!overview.limits.length) given.delete("state"); }
    });
  });
  show();
  return show;
}
