// What the views share: elements, colours, canvases, the tooltip, and links to call sites.

/** An element with attributes, event handlers and children; texts are never read as markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);

/** A table of rows of cells. A cell is a text or an element; columns of numbers stand right. */
function table(columns, rows) {
  const kind = (i) => (columns[i][1] === "number" ? { class: "number" } : {});
  const head = element("tr", {}, ...columns.map(([title], i) => element("th", { scope: "col", ...kind(i) }, title)));
  const body = rows.map((row) => element("tr", row.attributes ?? {}, ...row.cells.map((cell, i) => element("td", kind(i), cell))));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

/** A button that looks like the button of a group where exactly one is pressed. */
function press(chosen, ...all) {
  for (const id of all) byId(id).setAttribute("aria-pressed", String(id === chosen));
}

// Ten colours that stand apart on light and dark ground, for the sites with the most bytes; all others are grey.
const SITE_COLOURS = ["#4e8fd0", "#f28e2b", "#59a14f", "#d9649b", "#9c7fd1", "#d6b52c", "#3fb3ac", "#b07a4f", "#e0645c", "#8fb85a"];

function siteColour(site) {
  return SITE_COLOURS[site] ?? colour("other");
}

/** A colour of the style sheet; it depends on light, dark and print. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

/** Gives a canvas the size that it has on the screen, clears it, and returns its context with CSS pixels as units. */
function prepare(canvas, height = canvas.clientHeight) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + "px";
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "12px system-ui, 'Liberation Sans', 'DejaVu Sans', sans-serif";
  context.textBaseline = "middle";
  return { context, width, height };
}

/** Diagonal lines, for what is freed and waits for events. */
function hatch(context, base) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const lines = tile.getContext("2d");
  lines.fillStyle = base;
  lines.fillRect(0, 0, 6, 6);
  lines.strokeStyle = colour("pending");
  lines.lineWidth = 1.5;
  lines.beginPath();
  for (const x of [-3, 3, 9]) {
    lines.moveTo(x - 3, 9);
    lines.lineTo(x + 9, -3);
  }
  lines.stroke();
  return context.createPattern(tile, "repeat");
}

/** Where the pointer is on an element, in CSS pixels. */
function pointer(event, on) {
  const box = on.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}

function showTip(event, text) {
  const tip = byId("tip");
  tip.hidden = text === "";
  tip.textContent = text;
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, window.innerWidth - width - 8)) + "px";
  tip.style.top = Math.max(4, event.clientY + 18 + height > window.innerHeight ? event.clientY - height - 10 : event.clientY + 18) + "px";
}

const hideTip = () => { byId("tip").hidden = true; };

/** A text that does something when it is clicked. */
function link(attributes, action, ...children) {
  return element("a", { href: "#", ...attributes, click: (event) => { event.preventDefault(); action(); } }, ...children);
}

/** A link that selects a call site. */
function siteLink(site, withSwatch = true) {
  const made = link({ "data-site": String(site) }, () => select({ site }), app.rank.sites[site]);
  if (withSwatch) made.prepend(swatch(siteColour(site)));
  return made;
}

/** A small square of a colour. */
function swatch(style) {
  const made = element("span", { class: "swatch" });
  made.style.background = style;
  return made;
}

/** A call site by its name: a link where blocks of it are in the recording. */
function siteByName(name) {
  const site = app.rank.sites.indexOf(name);
  return site < 0 ? name : siteLink(site);
}

/** A sentence in which every call site is a link, and what stands between backticks is code. */
function sentence(text) {
  const whole = document.createDocumentFragment(), parts = text.split("`");
  parts.forEach((part, i) => whole.append(i % 2 === 1 && parts.length % 2 === 1 ? element("code", {}, part) : withLinks(part)));
  return whole;
}

function withLinks(text) {
  const whole = document.createDocumentFragment();
  const named = app.rank.sites.map((name, site) => ({ name, site })).filter(({ name }) => name !== "" && text.includes(name));
  // Of sites that begin alike, the longest name is meant.
  named.sort((a, b) => b.name.length - a.name.length);
  let rest = text;
  while (rest !== "") {
    let first = null;
    for (const { name, site } of named) {
      const at = rest.indexOf(name);
      if (at >= 0 && (first === null || at < first.at)) first = { at, name, site };
    }
    if (first === null) break;
    whole.append(rest.slice(0, first.at), siteLink(first.site, false));
    rest = rest.slice(first.at + first.name.length);
  }
  whole.append(rest);
  return whole;
}
