// What is shown is what the address says: reading it, changing it, hearing of changes.
const FILTERS = ["deployment", "from", "until", "model", "worker", "tenant", "prompt", "output", "slo", "state"];
const heard = [];

export const address = () => new URLSearchParams(location.search);

// The part of the address that chooses requests, always in the same order.
export function selection() {
  const given = address();
  const chosen = new URLSearchParams();
  for (const key of FILTERS) for (const value of given.getAll(key)) chosen.append(key, value);
  return chosen;
}

// Edit the address. `replace`: the change is no step to come back to.
export function change(edit, { replace = false } = {}) {
  const given = address();
  edit(given);
  const text = given.toString();
  if (text === address().toString()) return;
  history[replace ? "replaceState" : "pushState"](null, "", text ? "?" + text : location.pathname);
  tell();
}

export function clear(given) {
  for (const key of FILTERS) if (key !== "deployment" && key !== "slo") given.delete(key);
}

// One value more or less of a key that may have several.
export function toggle(key, value, on) {
  change((given) => {
    const others = given.getAll(key).filter((one) => one !== value);
    given.delete(key);
    for (const one of on ? [...others, value] : others) given.append(key, one);
  });
}

export function onChange(listener) { heard.push(listener); }
function tell() { for (const listener of heard) listener(); }
addEventListener("popstate", tell);

// The token of a page that is open to the network has become a cookie; the address need not hold it.
if (address().has("token")) {
  const given = address();
  given.delete("token");
  history.replaceState(null, "", given.size ? "?" + given : location.pathname);
}

// Ask the store; `signal` breaks it off there too.
export async function ask(what, { signal, chosen = selection(), ...more } = {}) {
  const query = new URLSearchParams(chosen);
  for (const [key, value] of Object.entries(more)) query.set(key, value);
  const answer = await fetch(`api/${what}?${query}`, { signal });
  const told = await answer.json().catch(() => ({ error: `the page got no answer (${answer.status})` }));
  if (!answer.ok) throw new Error([told.error, told.hint].filter(Boolean).join(". "));
  return told;
}
