// The report: deployments to choose from, light and dark, the reader's zone or UTC, pictures one by one.
"use strict";
(() => {
  const root = document.documentElement;
  const config = JSON.parse(document.getElementById("pdtrace-config").textContent);
  const keep = {
    get(name) { try { return localStorage.getItem("pdtrace-" + name); } catch { return null; } },
    set(name, value) { try { localStorage.setItem("pdtrace-" + name, value); } catch { /* private window */ } },
  };

  // Light and dark
  const theme = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  function nameTheme() { theme.textContent = dark() ? "light" : "dark"; theme.ariaLabel = `switch to ${theme.textContent} colours`; }
  if (keep.get("theme")) root.dataset.theme = keep.get("theme");
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    keep.set("theme", root.dataset.theme);
    nameTheme();
  });
  nameTheme();

  // Zone
  const zone = document.getElementById("zone");
  zone.addEventListener("click", () => {
    const utc = zone.getAttribute("aria-pressed") !== "true";
    zone.setAttribute("aria-pressed", String(utc));
    zone.textContent = utc ? "local time" : "UTC";
    pdtrace.zone(utc);
  });

  // Pictures
  const payloads = new Map();
  async function payload(figure) {
    if (!payloads.has(figure)) {
      payloads.set(figure, pdtrace.unpack(figure.querySelector("script.data").textContent));
    }
    return payloads.get(figure);
  }
  const done = new Set();
  async function drawAll(section) {
    for (const figure of section.querySelectorAll("figure.picture")) {
      if (section.hidden || done.has(figure)) continue;
      done.add(figure);
      const place = figure.querySelector(".chart");
      try {
        if (place) await pdtrace.draw(place, await payload(figure), config);
      } catch (error) {
        place.textContent = "This picture could not be drawn: " + error.message;
        console.error(error);
      }
      await new Promise((go) => setTimeout(go));
    }
    root.dataset.drawn = String(document.querySelectorAll("figure.picture .chart svg").length);
  }
  document.addEventListener("toggle", async (event) => {
    const figure = event.target.closest && event.target.closest("figure.picture");
    const rows = figure && event.target.open && event.target.querySelector(".rows");
    if (rows && !rows.hasChildNodes()) pdtrace.table(rows, (await payload(figure)).rows);
  }, true);
  document.addEventListener("click", async (event) => {
    const button = event.target.closest && event.target.closest("button.csv");
    if (!button) return;
    pdtrace.save(pdtrace.csv((await payload(button.closest("figure.picture"))).rows), button.dataset.file);
  });

  // Deployments
  const sections = [...document.querySelectorAll("section.deployment")];
  const chooser = document.getElementById("deployment");
  function choose(id) {
    const wanted = sections.find((section) => section.id === id) || sections[0];
    for (const section of sections) section.hidden = section !== wanted;
    if (chooser && wanted) chooser.value = wanted.id;
    if (wanted) drawAll(wanted);
  }
  if (chooser) {
    chooser.addEventListener("change", () => {
      history.replaceState(null, "", "#" + chooser.value);
      choose(chooser.value);
    });
    window.addEventListener("hashchange", () => choose(location.hash.slice(1)));
  }

  // On paper everything is open.
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.finding-more:not([open])")];
    for (const part of opened) part.open = true;
  });
  window.addEventListener("afterprint", () => { for (const part of opened) part.open = false; });

  pdtrace.tellTimes(document);
  choose(location.hash.slice(1));
})();
