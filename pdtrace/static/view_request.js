// One request: its facts, its pictures, what each system says of it.
import { address, ask, change } from "./view_state.js";
import { show } from "./view_picture.js";

const dialog = document.getElementById("request");
const title = document.getElementById("request-title");
const body = document.getElementById("request-body");
let shown = null;
let running;

export const open = (id) => change((given) => given.set("request", id));
const close = () => change((given) => given.delete("request"));

dialog.addEventListener("close", () => { if (address().has("request")) close(); });
document.getElementById("request-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("[data-request]");
  if (!link) return;
  event.preventDefault();
  open(link.dataset.request);
});

export async function follow() {
  const wanted = address().get("request");
  if (wanted === shown) return;
  running?.abort();
  running = new AbortController();
  pdtrace.forget(body);
  shown = wanted;
  if (wanted === null) { if (dialog.open) dialog.close(); return; }
  title.textContent = `Request ${wanted}`;
  body.replaceChildren("asking …");
  if (!dialog.open) dialog.showModal();
  try {
    const told = await ask("request", { signal: running.signal, request: wanted });
    title.textContent = `Request ${told.request}`;
    body.innerHTML = told.html; // escaped where it was made
    for (const picture of told.pictures) {
      const place = document.createElement("div");
      body.append(place);
      await show(place, picture);
    }
    const sections = document.createElement("div");
    sections.innerHTML = told.sections;
    body.append(sections);
    pdtrace.tellTimes(body);
  } catch (error) {
    if (error.name !== "AbortError") body.textContent = error.message;
  }
}
