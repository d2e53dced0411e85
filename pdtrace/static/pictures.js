// Pictures of a page: unpacks rows and specs, draws with Vega, writes tables and CSV. No network.
"use strict";
window.pdtrace = (() => {
  const shown = new Map(); // element -> {view, payload, width}
  let utc = false;
  // What a page may set before it draws: Vega's expressions interpreted instead of made to functions, its styles left out.
  const options = { ast: false, styles: true };

  // base64 of zlib of JSON -> value
  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text.trim()), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  // {length, columns: {name: values or {same: name of a column of the rows}}} -> array of objects
  function records(packed, rows) {
    const names = Object.keys(packed.columns);
    const columns = names.map((name) => {
      const column = packed.columns[name];
      return Array.isArray(column) ? column : rows.columns[column.same];
    });
    return Array.from({ length: packed.length }, (_, place) =>
      Object.fromEntries(names.map((name, n) => [name, columns[n][place]])));
  }

  const isTime = (part) => part && typeof part === "object" && part.type === "temporal";

  // Instants in UTC: scales and tooltips alike.
  function inUtc(part) {
    if (Array.isArray(part)) return part.map(inUtc);
    if (!part || typeof part !== "object") return part;
    const copy = Object.fromEntries(Object.entries(part).map(([key, value]) => [key, inUtc(value)]));
    if (isTime(part)) copy.scale = { ...(copy.scale || {}), type: "utc" };
    return copy;
  }

  // As wide as the room that there is; what stands beside the axes of parts is left out of their width.
  const SIDE = 96;
  function fitted(spec, width) {
    const parts = spec.vconcat || spec.hconcat || spec.concat || spec.facet || spec.repeat;
    if (!parts) {
      return spec.width === "container"
        ? { ...spec, width, autosize: { type: "fit-x", contains: "padding" } } : spec;
    }
    return narrowed(spec, Math.max(160, width - SIDE));
  }
  function narrowed(spec, width) {
    const copy = { ...spec };
    if (copy.width === "container") copy.width = width;
    for (const key of ["layer", "vconcat", "concat"]) {
      if (Array.isArray(copy[key])) copy[key] = copy[key].map((part) => narrowed(part, width));
    }
    if (copy.spec) copy.spec = narrowed(copy.spec, width);
    return copy;
  }

  function looks(config, width) {
    const columns = Math.max(2, Math.floor(width / 130));
    const small = width < 500;
    return {
      ...config,
      axis: { ...config.axis, labelLimit: small ? 90 : config.axis.labelLimit },
      legend: {
        ...config.legend, columns,
        layout: { top: { direction: small ? "vertical" : "horizontal", anchor: "start" } },
      },
    };
  }

  async function draw(element, payload, config) {
    const width = Math.floor(element.clientWidth);
    if (!payload.spec || width < 10) return;
    const spec = structuredClone(payload.spec);
    spec.datasets = Object.fromEntries(Object.entries(payload.datasets)
      .map(([name, packed]) => [name, records(packed, payload.rows)]));
    const before = shown.get(element);
    if (before) before.view.finalize();
    const result = await vegaEmbed(element, fitted(utc ? inUtc(spec) : spec, width), {
      mode: "vega-lite", renderer: "svg", actions: false, config: looks(config, width),
      tooltip: { theme: "custom", disableDefaultStyle: !options.styles },
      ast: options.ast, defaultStyle: options.styles,
    });
    const svg = element.querySelector("svg");
    if (svg) svg.setAttribute("aria-hidden", "true"); // the figure's label says what it shows
    shown.set(element, { view: result, payload, config, width });
    element.dispatchEvent(new CustomEvent("pdtrace:drawn", { bubbles: true, detail: result.view }));
  }

  // Let go of what was drawn inside an element that goes.
  function forget(root) {
    for (const [element, { view }] of [...shown]) {
      if (root.contains(element)) { view.finalize(); shown.delete(element); }
    }
  }

  async function redraw(all) {
    for (const [element, { payload, config, width }] of [...shown]) {
      if (all || Math.abs(element.clientWidth - width) > 4) await draw(element, payload, config);
    }
  }

  let waiting;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => redraw(false), 150);
  });

  async function zone(wanted) {
    utc = wanted;
    tellTimes(document);
    await redraw(true);
  }

  // <time datetime> in the reader's zone or UTC
  function tellTimes(root) {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const instant = new Date(element.dateTime);
      if (isNaN(instant)) continue;
      const parts = new Intl.DateTimeFormat("sv-SE", {
        dateStyle: "short", timeStyle: "medium", timeZone: utc ? "UTC" : undefined,
      }).format(instant);
      element.textContent = parts;
      element.title = instant.toISOString();
    }
    for (const element of root.querySelectorAll("[data-zone]")) {
      element.textContent = utc ? "UTC" : Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";
    }
  }

  function say(text) {
    const place = document.querySelector(".said");
    if (!place) return;
    place.textContent = text;
    setTimeout(() => { if (place.textContent === text) place.textContent = ""; }, 1800);
  }

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    say("copied: " + (text.length > 60 ? text.slice(0, 57) + "…" : text));
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("button.id");
    if (button) copy(button.dataset.full);
  });

  const LONG = 36;
  function short(text) {
    return text.length <= LONG ? text : text.slice(0, LONG - 9) + "…" + text.slice(-8);
  }
  const words = (value) => value === null || value === undefined ? ""
    : typeof value === "object" ? JSON.stringify(value) : String(value);

  // The first rows as a table.
  function table(element, rows, most = 20) {
    const head = document.createElement("tr");
    const body = document.createElement("tbody");
    const names = Object.keys(rows.columns);
    const numeric = names.map((name) => rows.columns[name].some((v) => typeof v === "number"));
    names.forEach((name, n) => {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = name;
      if (numeric[n]) cell.className = "number";
      head.append(cell);
    });
    for (let place = 0; place < Math.min(most, rows.length); place++) {
      const line = document.createElement("tr");
      names.forEach((name, n) => {
        const value = rows.columns[name][place];
        const text = typeof value === "number" && !Number.isInteger(value)
          ? String(Number(value.toPrecision(6))) : words(value);
        const cell = document.createElement("td");
        if (numeric[n]) cell.className = "number";
        if (text.length > LONG) {
          const button = document.createElement("button");
          button.className = "id";
          button.type = "button";
          button.dataset.full = text;
          button.title = text;
          button.textContent = short(text);
          cell.append(button);
        } else cell.textContent = text;
        line.append(cell);
      });
      body.append(line);
    }
    const made = document.createElement("table");
    const top = document.createElement("thead");
    top.append(head);
    made.append(top, body);
    element.replaceChildren(made);
    if (rows.length > most) {
      const more = document.createElement("p");
      more.className = "note";
      more.textContent = `${most} of ${rows.length.toLocaleString("en")} rows; the CSV has all.`;
      element.append(more);
    }
  }

  function csv(rows) {
    const names = Object.keys(rows.columns);
    const cell = (value) => {
      const text = words(value);
      return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
    };
    const lines = [names.map(cell).join(",")];
    for (let place = 0; place < rows.length; place++) {
      lines.push(names.map((name) => cell(rows.columns[name][place])).join(","));
    }
    return lines.join("\n") + "\n";
  }

  function save(text, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  return { options, forget, unpack, draw, redraw, zone, tellTimes, table, csv, save, say, copy };
})();
