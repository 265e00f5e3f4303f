// Allocated bytes by call site, stacked, with what is pending and reserved: over events or over time.

const LEFT = 74, RIGHT = 8, TOP = 8, BOTTOM = 24, CHECKPOINT = 1024;

/** The layers of one rank: a layer for each of the first sites, one for all others, one for what is pending. */
class Layers {
  constructor(rank, extra) {
    this.rank = rank;
    const own = Math.min(rank.sites.length, SITE_COLOURS.length);
    this.extra = extra !== null && extra >= own ? extra : null;
    this.sites = [...Array(own).keys(), ...(this.extra === null ? [] : [this.extra])];
    this.others = this.sites.length;
    this.pending = this.others + 1;
    this.count = this.pending + 1;
    this.layerOf = Int32Array.from(rank.sites, () => this.others);
    this.sites.forEach((site, layer) => { this.layerOf[site] = layer; });
    this.saved = new Float64Array((Math.floor(rank.events / CHECKPOINT) + 1) * this.count);
    const now = new Float64Array(this.count);
    for (let k = 0; k < rank.moments; k++) {
      this.step(now, k);
      if (k % CHECKPOINT === 0) this.saved.set(now, (k / CHECKPOINT) * this.count);
    }
  }

  /** Goes from moment k - 1 to moment k. */
  step(now, k) {
    const { changes, firstChange, blocks, siteOf } = this.rank;
    for (let c = firstChange[k]; c < firstChange[k + 1]; c++) {
      const block = Math.floor(changes[c] / 3), kind = changes[c] % 3, size = blocks.size[block];
      if (kind !== END) now[this.layerOf[siteOf[block]]] += kind === START ? size : -size;
      if (kind !== START) now[this.pending] += kind === FREED ? size : -size;
    }
  }

  /** Bytes of each layer at a moment. */
  at(moment) {
    const saved = Math.floor(moment / CHECKPOINT), now = this.saved.slice(saved * this.count, (saved + 1) * this.count);
    for (let k = saved * CHECKPOINT + 1; k <= moment; k++) this.step(now, k);
    return now;
  }

  name(layer) {
    return layer === this.pending ? "freed, waiting for events" : layer === this.others ? "all other sites" : this.rank.sites[this.sites[layer]];
  }

  colour(layer, context) {
    if (layer === this.pending) return hatch(context, colour("page"));
    if (layer === this.others) return colour("other");
    return this.sites[layer] === this.extra ? colour("accent") : siteColour(this.sites[layer]);
  }
}

/** The horizontal axis, shared by the timeline and a segment's history: which moments are shown, and where. */
class Axis {
  constructor(rank, byTime) {
    this.rank = rank;
    this.byTime = byTime && rank.times !== null && rank.secondsAt(rank.events) > 0;
    this.showAll();
  }

  /** Where a moment begins: the time, or the number, of its last event. */
  position(moment) {
    return this.byTime ? this.rank.secondsAt(moment) : moment - 1;
  }

  /** Where the first moment begins, which is before the first event. */
  get first() {
    return this.byTime ? 0 : -1;
  }

  /** Where the last moment ends. */
  get last() {
    return this.byTime ? this.rank.secondsAt(this.rank.events) * 1.005 : this.rank.events;
  }

  get length() {
    return this.last - this.first;
  }

  showAll() {
    this.from = this.first;
    this.to = this.last;
  }

  get isAll() {
    return this.from === this.first && this.to === this.last;
  }

  /** The last moment that begins at or before a position. */
  moment(position) {
    let low = 0, high = this.rank.events;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.position(middle) <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  x(position, width) {
    return LEFT + ((position - this.from) / (this.to - this.from)) * (width - LEFT - RIGHT);
  }

  at(x, width) {
    return this.from + ((x - LEFT) / (width - LEFT - RIGHT)) * (this.to - this.from);
  }

  /** Shows `factor` as much as before, with `fixed` where it is. */
  zoom(factor, fixed = (this.from + this.to) / 2) {
    const least = this.byTime ? this.length / 1e6 : Math.min(8, this.length);
    const length = Math.min(this.length, Math.max(least, (this.to - this.from) * factor));
    const share = (fixed - this.from) / (this.to - this.from);
    this.move(fixed - share * length, length);
  }

  /** Shows `length` from a position on, within what there is. */
  move(from, length = this.to - this.from) {
    this.from = Math.max(this.first, Math.min(from, this.last - length));
    this.to = Math.min(this.last, this.from + length);
  }
}

/** The moment with the most bytes for each pixel column, and the bytes of its layers. */
function columnsOf(layers, axis, width) {
  const { rank } = layers, columns = Math.max(1, Math.floor(width - LEFT - RIGHT));
  const most = new Float64Array(columns).fill(-1), reserved = new Float64Array(columns), heights = new Float64Array(columns * layers.count);
  const first = axis.moment(axis.from), scale = columns / (axis.to - axis.from), now = layers.at(first);
  for (let k = first; k <= rank.events; k++) {
    const position = axis.position(k);
    if (position > axis.to) break;
    if (k > first) layers.step(now, k);
    const end = k < rank.events ? axis.position(k + 1) : axis.last;
    const total = rank.allocatedAt[k] + rank.pendingAt[k];
    const left = Math.max(0, Math.floor((position - axis.from) * scale)), right = Math.min(columns - 1, Math.max(left, Math.ceil((end - axis.from) * scale) - 1));
    for (let c = left; c <= right; c++) {
      reserved[c] = Math.max(reserved[c], rank.reservedAt[k]);
      if (total <= most[c]) continue;
      most[c] = total;
      heights.set(now, c * layers.count);
    }
  }
  return { columns, most, reserved, heights };
}

/** A power of two that cuts a length into at most `lines` parts. */
function byteStep(length, lines) {
  return 2 ** Math.ceil(Math.log2(Math.max(length, 1) / lines));
}

/** 1, 2 or 5 times a power of ten that cuts a length into at most `lines` parts. */
function decimalStep(length, lines) {
  const power = 10 ** Math.floor(Math.log10(length / lines));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => length / step <= lines);
}

function drawTimeline() {
  const { rank, layers, axis } = app, canvas = byId("timeline"), { context, width, height } = prepare(canvas, 320);
  const drawn = columnsOf(layers, axis, width), bottom = height - BOTTOM;
  const held = Math.max(1, ...drawn.reserved, ...drawn.most), limit = limitOf(rank, held);
  const most = Math.max(held, limit) * 1.04, y = (amount) => bottom - (amount / most) * (bottom - TOP);
  drawGrid(context, width, height, most, y);
  drawLayers(context, drawn, y);
  context.lineWidth = 1.5;
  drawSteps(context, drawn.reserved, y, colour("reserved"));
  if (limit > 0) drawLine(context, y(limit), width, colour("oom"), `${TOTALS[rank.device_total_is][1]}: ${bytes(limit)}`);
  drawMarks(context, width, bottom);
  app.drawn.timeline = { most, bottom, width };
  const text = `Allocated bytes by call site, and reserved bytes, from ${rank.momentText(axis.moment(axis.from))} to ${rank.momentText(axis.moment(axis.to))}`;
  canvas.setAttribute("aria-label", `${text}. Arrow keys change the moment, plus and minus zoom.`);
}

/** The line of what the device has: none where that is not known, or far above what is shown. */
function limitOf(rank, held) {
  return rank.device_total_is !== "reserved_only" && rank.device_total < held * 1.4 ? rank.device_total : 0;
}

function drawLayers(context, { columns, heights, most }, y) {
  const { layers, selection } = app, base = new Float64Array(columns);
  for (let layer = 0; layer < layers.count; layer++) {
    const isSelected = layers.sites[layer] === selection.site;
    context.fillStyle = layers.colour(layer, context);
    context.globalAlpha = selection.site === null || isSelected ? 1 : 0.35;
    for (let c = 0; c < columns; ) {
      const from = base[c], to = from + heights[c * layers.count + layer];
      let end = c + 1;
      while (end < columns && base[end] === from && base[end] + heights[end * layers.count + layer] === to) end++;
      if (to > from && most[c] >= 0) context.fillRect(LEFT + c, y(to), end - c, Math.max(y(from) - y(to), 0.5));
      base.fill(to, c, end);
      c = end;
    }
  }
  context.globalAlpha = 1;
}

function drawSteps(context, values, y, style) {
  context.strokeStyle = style;
  context.beginPath();
  values.forEach((value, c) => {
    context.lineTo(LEFT + c, y(value));
    context.lineTo(LEFT + c + 1, y(value));
  });
  context.stroke();
}

/** A dashed horizontal line with its name. */
function drawLine(context, at, width, style, text) {
  context.strokeStyle = context.fillStyle = style;
  context.setLineDash([6, 4]);
  context.beginPath();
  context.moveTo(LEFT, at);
  context.lineTo(width - RIGHT, at);
  context.stroke();
  context.setLineDash([]);
  context.textAlign = "left";
  label(context, text, LEFT + 6, at + 10);
}

/** A text on a ground of its own, so that it can be read above lines. */
function label(context, text, x, y) {
  const style = context.fillStyle, { width } = context.measureText(text);
  context.fillStyle = colour("page");
  context.globalAlpha = 0.8;
  context.fillRect(context.textAlign === "right" ? x - width - 2 : x - 2, y - 8, width + 4, 16);
  context.globalAlpha = 1;
  context.fillStyle = style;
  context.fillText(text, x, y);
}

function drawGrid(context, width, height, most, y) {
  const { axis } = app, bottom = height - BOTTOM;
  context.strokeStyle = colour("line");
  context.fillStyle = colour("muted");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.beginPath();
  const lines = byteStep(most, 6);
  for (let amount = 0; amount <= most; amount += lines) {
    context.moveTo(LEFT, Math.round(y(amount)) + 0.5);
    context.lineTo(width - RIGHT, Math.round(y(amount)) + 0.5);
    context.fillText(bytes(amount), LEFT - 8, y(amount));
  }
  context.textAlign = "center";
  const step = Math.max(decimalStep(axis.to - axis.from, Math.max(2, width / 130)), axis.byTime ? 0 : 1);
  // Adding 0 makes -0 the 0 that it is shown as.
  for (let n = Math.ceil(axis.from / step) + 0; n * step <= axis.to; n++) {
    const x = axis.x(n * step, width);
    if (x > width - 30) break;
    context.moveTo(x, bottom);
    context.lineTo(x, bottom + 4);
    context.fillText(axis.byTime ? duration(n * step) + (app.rank.simulated_times ? " (model)" : "") : `event ${count(n * step)}`, Math.max(x, LEFT + 20), bottom + 14);
  }
  context.stroke();
}

/** Refused requests, phases, the selected block's life, and the moment that is looked at. */
function drawMarks(context, width, bottom) {
  const { rank, axis, moment, selection } = app, right = width - RIGHT;
  const inside = (x) => x >= LEFT - 0.5 && x <= right + 0.5;
  const vertical = (x, style, thick, dash = []) => {
    if (!inside(x)) return;
    context.strokeStyle = style;
    context.lineWidth = thick;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x, TOP);
    context.lineTo(x, bottom);
    context.stroke();
    context.setLineDash([]);
  };
  if (axis.byTime) {
    context.fillStyle = colour("muted");
    for (const { begin, end } of rank.phases) {
      const from = Math.max(LEFT, axis.x(begin / 1e6, width)), to = Math.min(right, axis.x(end / 1e6, width));
      if (to >= from) context.fillRect(from, 0, Math.max(1, to - from - 0.5), 4);
    }
  }
  if (selection.block !== null) {
    const { start, freed, end } = rank.blocks, x = (at) => Math.min(right, Math.max(LEFT, axis.x(at > rank.events ? axis.last : axis.position(at), width)));
    context.fillStyle = colour("accent");
    context.fillRect(x(start[selection.block]), bottom + 1, Math.max(2, x(freed[selection.block]) - x(start[selection.block])), 5);
    context.fillStyle = colour("pending");
    context.fillRect(x(freed[selection.block]), bottom + 1, x(end[selection.block]) - x(freed[selection.block]), 5);
  }
  drawOoms(context, width, (x) => vertical(x, colour("oom"), 1.5, [2, 3]), inside);
  vertical(axis.x(axis.position(moment), width), colour("accent"), 2);
}

/** A line for each request that was refused; of several that lie close together, the last one has the words. */
function drawOoms(context, width, line, inside) {
  const { rank, axis } = app, places = rank.ooms.map((oom) => axis.x(axis.position(oom.moment), width)).filter(inside);
  places.forEach(line);
  let behind = Infinity;
  for (const x of places.reverse()) {
    if (behind - x < 110) continue;
    behind = x;
    const isRight = x > width / 2;
    context.fillStyle = colour("oom");
    context.textAlign = isRight ? "right" : "left";
    label(context, "out of memory", x + (isRight ? -5 : 5), TOP + 40);
  }
}

/** The layer at a height of the timeline, at a moment; `null` above all of them. */
function layerAt(moment, amount) {
  const heights = app.layers.at(moment);
  let sum = 0;
  for (let layer = 0; layer < heights.length; layer++) {
    sum += heights[layer];
    if (amount < sum) return { layer, bytes: heights[layer] };
  }
  return null;
}

/** Moment and layer under the pointer. */
function timelineHit(event) {
  const { x, y } = pointer(event, byId("timeline")), { most, bottom, width } = app.drawn.timeline;
  const moment = app.axis.moment(Math.max(app.axis.from, Math.min(app.axis.to, app.axis.at(x, width))));
  return { moment, hit: layerAt(moment, ((bottom - y) / (bottom - TOP)) * most) };
}

function timelineTip(event) {
  const { rank, layers } = app, { moment, hit } = timelineHit(event);
  const oom = rank.ooms.find((oom) => oom.moment === moment);
  const lines = [
    rank.momentText(moment),
    `allocated ${bytes(rank.allocatedAt[moment])}` + (rank.pendingAt[moment] > 0 ? `, waiting for events ${bytes(rank.pendingAt[moment])}` : ""),
    `reserved ${bytes(rank.reservedAt[moment])}`,
    hit === null ? "" : `${layers.name(hit.layer)}: ${bytes(hit.bytes)}`,
    oom ? `out of memory: ${bytes(oom.size)} requested, ${bytes(oom.device_free)} free on the device` : "",
    ...rank.phases.filter(({ begin, end }) => app.axis.byTime && begin / 1e6 <= rank.secondsAt(moment) && rank.secondsAt(moment) <= end / 1e6).slice(0, 3).map(({ name }) => name),
  ];
  showTip(event, lines.filter((line) => line !== "").join("\n"));
}

function showLegend() {
  const { layers } = app;
  const items = layers.sites.map((site) => siteLink(site));
  const line = (style, text) => element("span", {}, swatch(style), text);
  if (app.rank.sites.length > layers.sites.length) items.push(line("var(--other)", `${count(app.rank.sites.length - layers.sites.length)} other sites`));
  items.push(element("span", {}, element("span", { class: "key pending" }), "freed, waiting for events"), line("var(--reserved)", "line: reserved"));
  byId("legend").replaceChildren(...items);
}

function listenToTimeline() {
  const canvas = byId("timeline");
  let grip = null;
  canvas.addEventListener("wheel", (event) => {
    if (event.deltaY > 0 && app.axis.isAll) return;
    event.preventDefault();
    app.axis.zoom(1.0015 ** Math.max(-300, Math.min(300, event.deltaY * (event.deltaMode === 0 ? 1 : 30))), app.axis.at(pointer(event, canvas).x, canvas.clientWidth));
    redraw("timeline", "segment");
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    grip = { x: event.clientX, from: app.axis.from, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    timelineTip(event);
    if (grip === null) return;
    grip.moved ||= Math.abs(event.clientX - grip.x) > 3;
    if (!grip.moved) return;
    const { axis } = app, perPixel = (axis.to - axis.from) / (canvas.clientWidth - LEFT - RIGHT);
    axis.move(grip.from - (event.clientX - grip.x) * perPixel);
    redraw("timeline", "segment");
  });
  canvas.addEventListener("pointerup", (event) => {
    const wasClick = grip !== null && !grip.moved;
    grip = null;
    if (!wasClick) return;
    const { moment, hit } = timelineHit(event);
    setMoment(moment);
    if (hit !== null && hit.layer < app.layers.others) select({ site: app.layers.sites[hit.layer] });
  });
  canvas.addEventListener("pointercancel", () => { grip = null; });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("keydown", (event) => {
    const { axis, moment, rank } = app, step = event.shiftKey ? Math.max(1, Math.round(rank.events / 50)) : 1;
    const actions = {
      ArrowLeft: () => setMoment(moment - step),
      ArrowRight: () => setMoment(moment + step),
      Home: () => setMoment(0),
      End: () => setMoment(rank.events),
      "+": () => axis.zoom(0.6, axis.position(moment)),
      "-": () => axis.zoom(1 / 0.6, axis.position(moment)),
      0: () => axis.showAll(),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
    redraw("timeline", "segment");
  });
  const zoom = (change) => () => {
    change();
    redraw("timeline", "segment");
  };
  byId("zoom-in").addEventListener("click", zoom(() => app.axis.zoom(0.5)));
  byId("zoom-out").addEventListener("click", zoom(() => app.axis.zoom(2)));
  byId("zoom-all").addEventListener("click", zoom(() => app.axis.showAll()));
  byId("by-event").addEventListener("click", () => setAxis(false));
  byId("by-time").addEventListener("click", () => setAxis(true));
}

/** Changes between events and time, and goes on showing the same moments. */
function setAxis(byTime) {
  const { axis, rank } = app, [first, last] = [axis.moment(axis.from), axis.moment(axis.to)], all = axis.isAll;
  app.axis = new Axis(rank, byTime);
  if (!all) app.axis.move(app.axis.position(first), Math.max(app.axis.position(last) - app.axis.position(first), app.axis.length / 1e6));
  press(app.axis.byTime ? "by-time" : "by-event", "by-event", "by-time");
  redraw("timeline", "segment");
}
