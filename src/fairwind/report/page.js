// What the page does beside showing text: charts, one legend for all, the table of clients, targets, downloads.
"use strict";
const find = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const dark = matchMedia("(prefers-color-scheme: dark)");
const names = all(".key").map((key) => key.dataset.name);
const hidden = new Set();
const views = {};

function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function number(value, digits = 4) {
  return value === null || value === undefined ? "–" : String(Number(value.toPrecision(digits)));
}

function score(value) {
  return page.percent && value !== null ? value.toFixed(1) : number(value);
}

// Charts

function keyless(part) {  // the legend of the page stands for the charts' own
  for (const layer of part.layer || []) keyless(layer);
  for (const name of ["color", "strokeDash"]) {
    const channel = (part.encoding || {})[name];
    if (channel && channel.field === "algorithm" && names.length) channel.legend = null;
  }
  return part;
}

async function embed(place, spec) {
  const mode = dark.matches ? "dark" : "light";
  const options = { config: page.themes[mode], renderer: "svg", actions: false, tooltip: { theme: mode } };
  const { view } = await vegaEmbed(place, keyless(structuredClone(spec)), options);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", spec.description || spec.title || "chart");
  find("svg", place).setAttribute("aria-hidden", "true");  // thousands of marks, each with a name of its own
  return view;
}

async function draw() {
  for (const [name, spec] of Object.entries(page.specs)) {
    const view = views[name] = await embed(document.getElementById(name), spec);
    view.addEventListener("click", (event, item) => {
      if (item && item.datum && item.datum.k !== undefined) open(item.datum.k);
    });
    hide(view, spec);
  }
}

function hide(view, spec) {
  if ((spec.params || []).some((param) => param.name === "hidden")) view.signal("hidden", [...hidden]).runAsync();
}

// The legend

function showLegend() {
  for (const key of all(".key")) key.setAttribute("aria-pressed", String(!hidden.has(key.dataset.name)));
  for (const [name, view] of Object.entries(views)) hide(view, page.specs[name]);
  if (page.clients) fillClients();
  if (page.live) sessionStorage.setItem("hidden", JSON.stringify([...hidden]));
}

for (const key of all(".key")) {
  key.addEventListener("click", () => {
    const name = key.dataset.name;
    if (!hidden.delete(name)) hidden.add(name);
    showLegend();
  });
}
for (const button of all("[data-show]")) {
  button.addEventListener("click", () => {
    hidden.clear();
    if (button.dataset.show === "none") names.forEach((name) => hidden.add(name));
    showLegend();
  });
}

// Downloads

function download(name, content, type) {
  const link = element("a", "", { download: name, href: URL.createObjectURL(new Blob([content], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function csv(rows) {
  const cell = (value) => /[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;
  return rows.map((row) => row.map((value) => cell(String(value ?? ""))).join(",")).join("\n") + "\n";
}

function chartRows(spec) {
  const rows = spec.datasets[spec.usermeta.csv];
  const columns = [...new Set(rows.flatMap(Object.keys))];
  const head = columns.map((name) => /^a\d+$/.test(name) ? page.names[Number(name.slice(1))] : name);
  return [head, ...rows.map((row) => columns.map((name) => row[name]))];
}

async function picture(name, kind) {  // on white, with its own legend
  const spec = { ...structuredClone(page.specs[name]), width: 640 };
  const config = { ...page.themes.light, background: "white", padding: 12 };
  const { view } = await vegaEmbed(element("div"), spec, { config, renderer: "none", actions: false });
  hide(view, spec);
  await view.runAsync();
  if (kind === "svg") return download(`${name}.svg`, await view.toSVG(), "image/svg+xml");
  const canvas = await view.toCanvas(2);
  canvas.toBlob((blob) => download(`${name}.png`, blob, "image/png"));
}

function saveMenu(what, entries) {
  const menu = element("details", "", { class: "save" });
  menu.append(element("summary", "Save", { "aria-label": `Save ${what}` }));
  for (const [text, act] of entries) {
    const button = element("button", text, { type: "button" });
    button.addEventListener("click", act);
    menu.append(button);
  }
  return menu;
}

for (const [name, spec] of Object.entries(page.specs)) {
  const place = document.getElementById(name);
  place.after(saveMenu(`the chart ${spec.description || name}`, [
    ["PNG", () => picture(name, "png")],
    ["SVG", () => picture(name, "svg")],
    ["CSV", () => download(`${name}.csv`, csv(chartRows(spec)), "text/csv")],
  ]));
}
for (const region of all(".scroll")) {
  const table = find("table", region), label = region.getAttribute("aria-label");
  const rows = () => table.id === "clients-table" ? clientRows() : all("tr", table).map((row) => [...row.cells].map((c) => c.textContent));
  const file = `${label.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.csv`;
  region.after(saveMenu(`the table ${label}`, [["CSV", () => download(file, csv(rows()), "text/csv")]]));
}
for (const button of all("[data-copy]")) {
  const text = document.getElementById(button.dataset.copy);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text);
    }
  });
}

// Rounds and costs to a target

function fillTargets() {
  const { curves, costs, seconds, sign } = page.targets;
  const target = find("#target-value").valueAsNumber;
  const said = (round) => (round === Infinity ? "–" : round.toLocaleString("en"));
  let reached = 0;
  all("#targets-table tbody tr").forEach((row, i) => {
    const rounds = curves[find("#target-measure").value][i]
      .map((curve) => curve.find(([, value]) => sign * value >= sign * target)?.[0] ?? Infinity)
      .sort((a, b) => a - b);
    const [low, at, high] = [rounds[0], rounds[Math.floor(rounds.length / 2)], rounds.at(-1)];
    reached += at < Infinity;
    row.cells[1].textContent = said(at) + (low === high ? "" : ` (${said(low)} to ${said(high)})`);
    [...(costs ? costs[i] : []), ...(seconds ? [seconds] : [])].forEach((each, j) => {
      row.cells[2 + j].textContent = at < Infinity ? number(at * each, 3) : "–";
    });
  });
  find("#target-status").textContent = `${reached} of ${curves.avg.length} reach it`;
}
if (page.targets) {
  for (const input of [find("#target-value"), find("#target-measure")]) input.addEventListener("input", fillTargets);
  fillTargets();
}

// The table of clients

const sorting = { column: "mean", falling: false };
const ROWS = 20;
let shownRows = ROWS;

function column(name) {
  const c = page.clients;
  if (name === "mean") return c.names.map((_, k) => mean(c.score.map((row) => row[k])));
  if (name.startsWith("a")) return c.score[Number(name.slice(1))];
  return { n: c.names, g: c.groups, r: c.train, t: c.test }[name];
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function sorted() {
  const wanted = find("#clients-search").value.trim().toLowerCase(), c = page.clients;
  const by = column(sorting.column), side = sorting.falling ? -1 : 1;
  const order = (a, b) => typeof by[a] === "string" ? by[a].localeCompare(by[b], "en", { numeric: true }) : by[a] - by[b];
  const matches = (k) => `${c.names[k]} ${c.groups[k] || ""}`.toLowerCase().includes(wanted);
  return c.names.map((_, k) => k).filter(matches)
    .sort((a, b) => (by[a] === null) - (by[b] === null) || side * order(a, b) || a - b);
}

function clientRows() {
  const c = page.clients, grouped = c.groups.length > 0;
  const head = ["client", ...(grouped ? ["group"] : []), "training samples", `${c.part} samples`, ...page.names];
  return [head, ...sorted().map((k) => [c.names[k], ...(grouped ? [c.groups[k]] : []), c.train[k], c.test[k], ...c.score.map((row) => row[k])])];
}

function fillClients() {
  const c = page.clients, found = sorted(), body = find("#clients-table tbody");
  body.replaceChildren(...found.slice(0, shownRows).map((k) => {
    const row = element("tr"), head = element("th", "", { scope: "row" });
    const button = element("button", c.names[k], { type: "button", class: "name", "data-client": k });
    button.addEventListener("click", () => open(k));
    head.append(button);
    row.append(head);
    if (c.groups.length) row.append(element("td", c.groups[k]));
    row.append(element("td", c.train[k].toLocaleString("en")), element("td", c.test[k].toLocaleString("en")));
    c.score.forEach((values, i) => row.append(element("td", score(values[k]), { "data-column": `a${i}` })));
    return row;
  }));
  for (const cell of all("#clients-table [data-column]")) {
    const place = cell.dataset.column;
    if (/^a\d+$/.test(place)) cell.hidden = hidden.has(page.names[Number(place.slice(1))]);
    if (cell.tagName === "TH") {
      if (place === sorting.column) cell.setAttribute("aria-sort", sorting.falling ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
  }
  find("#clients-status").textContent = `${Math.min(shownRows, found.length)} of ${found.length.toLocaleString("en")} clients`;
  find("#clients-more").hidden = found.length <= shownRows;
}

if (page.clients) {
  find("#clients-search").addEventListener("input", () => { shownRows = ROWS; fillClients(); });
  find("#clients-more").addEventListener("click", () => { shownRows += 100; fillClients(); });
  for (const button of all("#clients-table thead button")) {
    button.addEventListener("click", () => {
      const chosen = button.parentElement.dataset.column;
      sorting.falling = sorting.column === chosen && !sorting.falling;
      sorting.column = chosen;
      fillClients();
    });
  }
  fillClients();
}

// One client

function curveRows(k) {
  const curves = page.clients.curves, place = curves ? curves.clients.indexOf(k) : -1;
  if (place < 0) return [];
  curves.values ||= new Uint16Array(Uint8Array.from(atob(curves.data), (c) => c.charCodeAt(0)).buffer);
  const rows = [], { rounds, clients, low, high, steps } = curves;
  page.names.forEach((algorithm, i) => rounds.forEach((round, t) => {
    const step = curves.values[(i * rounds.length + t) * clients.length + place];
    if (step <= steps) rows.push({ algorithm, round, score: Number((low + step / steps * (high - low)).toPrecision(4)) });
  }));
  return rows;
}

async function open(k) {
  const c = page.clients, dialog = find("#client"), rows = curveRows(k);
  find("h2", dialog).textContent = `Client ${c.names[k]}`;
  const group = c.groups.length ? `group ${c.groups[k]}; ` : "", test = c.test[k];
  const coarse = page.percent && test ? ` One ${c.part} sample is ${number(100 / test, 3)} points.` : "";
  find(".about", dialog).textContent = `${group}${c.train[k].toLocaleString("en")} training samples, ${test.toLocaleString("en")} ${c.part} samples.${coarse}`;
  find("tbody", dialog).replaceChildren(...page.names.map((name, i) => {
    const row = element("tr"), head = element("th", name, { scope: "row" });
    const key = all(".key").find((each) => each.dataset.name === name);
    if (key) {  // the legend is behind the dialog
      head.style.cssText = key.style.cssText;
      head.prepend(find("svg", key).cloneNode(true), " ");
    }
    row.append(head, element("td", score(c.score[i][k])));
    return row;
  }));
  find(".left-out", dialog).hidden = rows.length > 0;
  const place = find("#client-chart");
  place.hidden = !rows.length;
  if (!dialog.open) dialog.showModal();
  if (!rows.length) return;
  const view = await embed(place, { ...page.client, data: { values: rows } });
  hide(view, page.client);
}
if (page.clients) find("#client .close").addEventListener("click", () => find("#client").close());

// A page that follows a run asks whether there is something new.

if (page.live) {
  for (const name of JSON.parse(sessionStorage.getItem("hidden") || "[]")) if (names.includes(name)) hidden.add(name);
  showLegend();
  setInterval(async () => {
    const answer = await page.newest().catch(() => null);
    if (answer !== null && answer !== page.live && !find("#client")?.open) location.reload();
  }, 2000);
}

const drawn = draw();
dark.addEventListener("change", draw);
