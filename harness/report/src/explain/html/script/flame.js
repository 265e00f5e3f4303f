// Call stacks as a flame graph, the outermost frame on top: as wide as what was allocated below it.

const FLAME_ROW = 20;

/** What a stack weighs. */
function stackWeights() {
  const { rank, moment, weight } = app;
  if (weight === "peak") return rank.stacks.map((stack) => stack.at_peak);
  if (weight === "life") return rank.stacks.map((stack) => stack.byte_seconds ?? stack.byte_events);
  const sums = rank.stacks.map(() => 0);
  for (let i = 0; i < rank.siteOf.length; i++) if (rank.isAllocated(i, moment)) sums[rank.blocks.stack[i]] += rank.blocks.size[i];
  return sums;
}

/** The frames as a tree: each node has its frame, its weight, the sites below it and its children. */
function flameTree() {
  const { rank } = app, root = { frame: null, value: 0, sites: new Set(), children: new Map(), key: "" };
  stackWeights().forEach((value, index) => {
    const { frames, site } = rank.stacks[index];
    if (value === 0) return;
    let node = root;
    for (const frame of [null, ...(frames.length === 0 ? [-1 - site] : frames)]) {
      if (frame !== null) {
        if (!node.children.has(frame)) node.children.set(frame, { frame, value: 0, sites: new Set(), children: new Map(), key: `${node.key}/${frame}` });
        node = node.children.get(frame);
      }
      node.value += value;
      node.sites.add(site);
    }
  });
  return root;
}

/** Bytes, or bytes × lifetime. */
function weightText(value) {
  if (app.weight !== "life") return bytes(value);
  return app.rank.times === null ? `${bytes(value)} × events` : `${bytes(value)} × s${app.rank.simulated_times ? " (model time)" : ""}`;
}

/** A node in words: function, file and line; of a stack without frames, its site. */
function frameText({ frame }) {
  if (frame === null) return "all stacks";
  if (frame < 0) return app.rank.sites[-1 - frame];
  const [name, file, line] = app.rank.frames[frame];
  return `${name}  ${file.split(/[\\/]/).pop()}:${line}`;
}

function drawFlame() {
  const host = byId("flame"), tree = flameTree(), width = host.clientWidth, NARROWEST = 2;
  const path = [tree];
  for (const frame of app.flamePath) {
    const child = path[path.length - 1].children.get(frame);
    if (!child) break;
    path.push(child);
  }
  const nodes = [];
  let depth = 0;
  const place = (node, left, wide, row) => {
    if (wide < NARROWEST) return;
    depth = Math.max(depth, row + 1);
    nodes.push(flameNode(node, left, wide, row, tree.value));
    const children = [...node.children.values()].sort((a, b) => b.value - a.value);
    let at = left;
    for (const child of children) {
      const part = (child.value / node.value) * wide;
      place(child, at, part, row + 1);
      at += part;
    }
  };
  // What leads to the node that fills the width is as wide as it.
  path.slice(0, -1).forEach((node, row) => nodes.push(flameNode(node, 0, width, row, tree.value)));
  if (tree.value > 0) place(path[path.length - 1], 0, width, path.length - 1);
  host.style.height = Math.max(depth, 1) * FLAME_ROW + "px";
  host.replaceChildren(...(tree.value > 0 ? nodes : ["Nothing was allocated then."]));
  byId("flame-all").hidden = app.flamePath.length === 0;
  const what = { peak: `${app.rank.momentText(app.rank.peak_moment)}: ${bytes(app.rank.peak_allocated)} allocated.`, moment: `${app.rank.momentText(app.moment)}: ${bytes(app.rank.allocatedAt[app.moment])} allocated.`, life: "Each block's size times how long it was allocated." };
  byId("flame-hint").textContent = `${what[app.weight]} Click a frame to widen it.`;
}

function flameNode(node, left, width, row, whole) {
  const { selection, rank } = app, text = frameText(node), share = ((100 * node.value) / whole).toFixed(1);
  const isMatch = selection.site !== null && node.sites.has(selection.site);
  const onlySite = node.sites.size === 1 ? [...node.sites][0] : null;
  const where = node.frame !== null && node.frame >= 0 ? `\n${rank.frames[node.frame][1]}:${rank.frames[node.frame][2]}` : "";
  const path = node.key.split("/").slice(1).map(Number);
  const made = element("button", {
    class: selection.site === null ? null : isMatch ? "match" : "dimmed",
    "data-key": node.key,
    "data-value": String(node.value),
    pointermove: (event) => showTip(event, `${text}${where}\n${weightText(node.value)} (${share} %)`),
    pointerleave: hideTip,
    click: () => {
      app.flamePath = path;
      hideTip();
      redraw("flame");
      if (onlySite !== null) select({ site: onlySite });
      byId("flame").querySelector(`[data-key="${node.key}"]`)?.focus();
    },
  }, text);
  made.setAttribute("aria-label", `${text}, ${weightText(node.value)}, ${share} %`);
  const percent = (part) => `${(100 * part) / byId("flame").clientWidth}%`;
  made.style.cssText = `left: ${percent(left)}; top: ${row * FLAME_ROW}px; width: ${percent(width)}; background: ${onlySite === null ? "#c3ccd6" : onlySite < SITE_COLOURS.length ? SITE_COLOURS[onlySite] : "#a9b3bd"}`;
  return made;
}

function listenToFlame() {
  const weigh = (weight) => () => {
    app.weight = weight;
    press("flame-" + weight, "flame-peak", "flame-moment", "flame-life");
    redraw("flame");
  };
  for (const weight of ["peak", "moment", "life"]) byId("flame-" + weight).addEventListener("click", weigh(weight));
  byId("flame-all").addEventListener("click", () => {
    app.flamePath = [];
    redraw("flame");
  });
}
