// Every segment with its blocks at one moment, the segments that are pinned, and the history of one segment.

const ROWS = 16, ROW = 15, HEAD = 22, GAP = 2;

/** Segments by pool and stream; each such lane has a scale of its own, so that small segments can be seen beside large ones. */
function lanesOf(segments) {
  const lanes = new Map();
  for (const segment of segments) {
    const key = segment.pool + " " + segment.stream;
    if (!lanes.has(key)) lanes.set(key, { pool: segment.pool, stream: segment.stream, segments: [], bytes: 0, used: 0 });
    const lane = lanes.get(key);
    lane.segments.push(segment);
    lane.bytes += segment.end - segment.address;
    lane.used += segment.used;
  }
  return [...lanes.values()].sort((a, b) => b.bytes - a.bytes);
}

/** Puts the segments of a lane one behind the other, in rows as text has lines. */
function layOut(lane, width, all, top) {
  const rows = Math.max(1, Math.round((ROWS * lane.bytes) / all)), gaps = lane.segments.length * GAP;
  lane.scale = lane.bytes / Math.max(rows * width * 0.5, rows * width - gaps - rows * 4);
  lane.top = top;
  let at = 0;
  for (const segment of lane.segments) {
    segment.lane = lane;
    segment.at = at;
    at += Math.max(2, (segment.end - segment.address) / lane.scale) + GAP;
  }
  lane.rows = Math.max(1, Math.ceil((at - GAP) / width));
  return top + HEAD + lane.rows * ROW + 6;
}

/** The rectangles of a stretch of a lane, one for each row that it touches. */
function stretches(lane, from, to, width) {
  const parts = [];
  for (let row = Math.floor(from / width); row * width < to && row < lane.rows; row++) {
    const left = Math.max(from - row * width, 0), right = Math.min(to - row * width, width);
    if (right > left) parts.push({ x: left, y: lane.top + HEAD + row * ROW, width: right - left });
  }
  return parts;
}

/**
 * Finds what is free in a segment and cannot go back to the driver: all that is free beside blocks; of an expandable segment, what is free in pages
 * that blocks lie in.
 */
function findPinned(segment) {
  const { rank } = app, { address, size } = rank.blocks, page = segment.expandable ? rank.pools[segment.pool].page : segment.end - segment.address;
  let at = segment.address;
  segment.pinned = 0;
  /** The free stretches that are pinned. */
  segment.gaps = [];
  const gap = (from, to) => {
    const first = segment.address + Math.ceil((from - segment.address) / page) * page, last = segment.address + Math.floor((to - segment.address) / page) * page;
    for (const [start, end] of last > first ? [[from, first], [last, to]] : [[from, to]]) {
      if (end === start) continue;
      segment.gaps.push([start, end]);
      segment.pinned += end - start;
    }
  };
  for (const block of segment.blocks) {
    gap(at, Math.max(at, address[block]));
    at = address[block] + size[block];
  }
  gap(at, Math.max(at, segment.end));
}

const isPinned = (segment) => segment.pinned > 0;

function drawSegments() {
  const { rank, moment } = app, canvas = byId("segments"), width = canvas.clientWidth;
  const segments = rank.segmentsAt(moment), lanes = lanesOf(segments), all = lanes.reduce((sum, lane) => sum + lane.bytes, 0);
  let height = 4;
  segments.forEach(findPinned);
  for (const lane of lanes) height = layOut(lane, width, all, height);
  const { context } = prepare(canvas, Math.max(height, 30));
  if (segments.length === 0) {
    context.fillStyle = colour("muted");
    context.fillText("No segment is held at this moment.", 0, 14);
  }
  const waiting = hatch(context, colour("free"));
  for (const lane of lanes) drawLane(context, lane, width, waiting);
  app.drawn.segments = { lanes, width };
  canvas.setAttribute("aria-label", `${count(segments.length)} segments at ${rank.momentText(moment)}, ${bytes(rank.reservedAt[moment])} reserved. The table below names those that are pinned.`);
  showPinned(segments);
}

function drawLane(context, lane, width, waiting) {
  const { rank, moment, selection } = app, { address, size } = rank.blocks;
  context.fillStyle = colour("text");
  context.textAlign = "left";
  const free = lane.bytes - lane.used, segments = lane.segments.length;
  context.fillText(`${rank.pools[lane.pool].name}, ${rank.streamText(lane.stream)}: ${bytes(lane.bytes)} in ${count(segments)} ${segments === 1 ? "segment" : "segments"}, ${bytes(free)} free in them`, 0, lane.top + 12);
  for (const segment of lane.segments) {
    const place = (at) => segment.at + (at - segment.address) / lane.scale;
    const whole = stretches(lane, segment.at, Math.max(segment.at + 2, place(segment.end)), width);
    context.fillStyle = colour("free");
    for (const part of whole) context.fillRect(part.x, part.y, part.width, ROW - 3);
    for (const block of segment.blocks) {
      const isSelected = block === selection.block || (selection.block === null && rank.siteOf[block] === selection.site);
      context.globalAlpha = selection.site === null || isSelected ? 1 : 0.3;
      context.fillStyle = rank.isAllocated(block, moment) ? siteColour(rank.siteOf[block]) : waiting;
      const from = place(address[block]), to = place(address[block] + size[block]);
      for (const part of stretches(lane, from, to, width)) {
        context.fillRect(part.x, part.y, Math.max(part.width - (part.width > 3 ? 0.5 : 0), 0.75), ROW - 3);
        if (block === selection.block) frame(context, part, colour("text"));
      }
    }
    context.globalAlpha = 1;
    // Of an expandable segment, pages go back one by one: only what is free in pages with blocks is marked.
    const marked = !isPinned(segment) ? [] : segment.expandable ? segment.gaps.flatMap(([from, to]) => stretches(lane, place(from), place(to), width)) : whole;
    context.fillStyle = colour("pinned");
    for (const part of marked) context.fillRect(part.x, part.y + ROW - 3, part.width, 2);
    if (segment.address === app.segment?.address) whole.forEach((part) => frame(context, part, colour("accent")));
  }
}

function frame(context, { x, y, width }, style) {
  context.strokeStyle = style;
  context.lineWidth = 2;
  context.strokeRect(x + 1, y, Math.max(width - 2, 1), ROW - 3);
}

/** Segment and block under the pointer. */
function segmentHit(event) {
  const { x, y } = pointer(event, byId("segments")), { lanes, width } = app.drawn.segments, { address, size } = app.rank.blocks;
  for (const lane of lanes) {
    const row = Math.floor((y - lane.top - HEAD) / ROW);
    if (row < 0 || row >= lane.rows) continue;
    const at = row * width + x;
    const segment = lane.segments.find((segment) => segment.at <= at && at < segment.at + Math.max(2, (segment.end - segment.address) / lane.scale));
    if (!segment) return null;
    // A block that is narrower than a pixel can be hit too.
    const near = (block) => Math.max(0, address[block] - here, here - address[block] - size[block]);
    const here = segment.address + (at - segment.at) * lane.scale;
    const [block] = segment.blocks.filter((block) => near(block) <= lane.scale).sort((a, b) => near(a) - near(b));
    return { segment, block: block ?? null };
  }
  return null;
}

function segmentWords(segment) {
  const held = segment.end - segment.address;
  return `segment of ${bytes(held)} at ${app.rank.addressText(segment.address)}, ${bytes(held - segment.used)} free, ${count(segment.blocks.length)} ${segment.blocks.length === 1 ? "block" : "blocks"}`;
}

function segmentTip(event) {
  const found = segmentHit(event), { rank, moment } = app;
  if (found === null) return hideTip();
  const { segment, block } = found, { size, requested } = rank.blocks;
  const of = block === null ? "free" : `${rank.isAllocated(block, moment) ? "block" : "freed block, waiting for events,"} of ${bytes(size[block])} (${count(requested[block])} B requested)\n${rank.sites[rank.siteOf[block]]}\nallocated ${rank.blocks.start[block] === 0 ? "before the recording" : "at " + rank.momentText(rank.blocks.start[block])}`;
  showTip(event, `${of}\n${segmentWords(segment)}`);
}

/** The segments that are mostly free and still cannot go back, with the blocks that hold them. */
function showPinned(segments) {
  const { rank } = app, MOST = 10, { size, start } = rank.blocks, pinned = segments.filter(isPinned);
  pinned.sort((a, b) => b.pinned - a.pinned);
  const sum = pinned.reduce((sum, segment) => sum + segment.pinned, 0);
  byId("pinned").dataset.bytes = String(sum);
  if (pinned.length === 0) {
    byId("pinned").replaceChildren(element("p", { class: "hint" }, "No segment is pinned at this moment."));
    return;
  }
  const rows = pinned.slice(0, MOST).map((segment) => {
    const oldest = segment.blocks.reduce((a, b) => (start[b] < start[a] ? b : a)), others = segment.blocks.length - 1;
    const choose = link({ class: "address" }, () => selectSegment(segment), rank.addressText(segment.address));
    const by = element("span", {}, blockLink(oldest, bytes(size[oldest])), " from ", siteLink(rank.siteOf[oldest]), others === 0 ? "" : ` and ${count(others)} younger`);
    return { cells: [choose, bytes(segment.end - segment.address), bytes(segment.pinned), by, start[oldest] === 0 ? "before the recording" : rank.momentText(start[oldest])] };
  });
  const text = `${bytes(sum)} are free in ${count(pinned.length)} pinned ${pinned.length === 1 ? "segment" : "segments"}: the blocks in them keep this memory from going back to the driver.` + (pinned.length > MOST ? ` The ${MOST} with the most:` : "");
  byId("pinned").replaceChildren(element("p", {}, text), table([["segment"], ["size", "number"], ["pinned", "number"], ["held by"], ["held since"]], rows));
}

/** What lay at each address of the selected segment, over time. */
function drawSegmentHistory() {
  const { rank, axis, segment, selection, moment } = app;
  byId("segment").hidden = segment === null;
  if (segment === null) return;
  byId("segment-title").textContent = "History of the " + segmentWords(segment);
  const { context, width, height } = prepare(byId("segment-history"), 220), right = width - RIGHT;
  const x = (at) => Math.min(right, Math.max(LEFT, axis.x(at > rank.events ? axis.last : axis.position(at), width)));
  const y = (at) => height - ((Math.min(Math.max(at, segment.address), segment.end) - segment.address) / (segment.end - segment.address)) * height;
  context.fillStyle = colour("unreserved");
  context.fillRect(LEFT, 0, right - LEFT, height);
  const touches = (at, size) => at < segment.end && at + size > segment.address;
  const box = (from, to, at, size) => context.fillRect(x(from), y(at + size), Math.max(x(to) - x(from), 1), Math.max(y(at) - y(at + size), 1));
  context.fillStyle = colour("free");
  const held = rank.segments;
  for (let i = 0; i < held.start.length; i++) if (touches(held.address[i], held.size[i])) box(held.start[i], held.end[i], held.address[i], held.size[i]);
  const { address, size, start, freed, end } = rank.blocks, waiting = hatch(context, colour("free")), drawn = new Map();
  const [first, last] = [axis.moment(axis.from), axis.moment(axis.to)];
  for (let i = 0; i < address.length; i++) {
    if (!touches(address[i], size[i]) || end[i] < first || start[i] > last) continue;
    // Of blocks that are narrower than a pixel, one for each pixel and address is enough.
    const column = Math.floor(x(start[i]));
    if (x(end[i]) - column < 1 && drawn.get(address[i]) === column) continue;
    drawn.set(address[i], column);
    context.globalAlpha = selection.site === null || rank.siteOf[i] === selection.site ? 1 : 0.3;
    context.fillStyle = siteColour(rank.siteOf[i]);
    box(start[i], freed[i], address[i], size[i]);
    if (end[i] > freed[i]) {
      context.fillStyle = waiting;
      box(freed[i], end[i], address[i], size[i]);
    }
  }
  context.globalAlpha = 1;
  context.fillStyle = colour("muted");
  context.textAlign = "right";
  context.fillText("+" + bytes(segment.end - segment.address), LEFT - 6, 8);
  context.fillText("0", LEFT - 6, height - 8);
  context.fillStyle = colour("accent");
  if (x(moment) > LEFT && x(moment) < right) context.fillRect(x(moment) - 1, 0, 2, height);
  byId("segment-history").setAttribute("aria-label", byId("segment-title").textContent);
}

/** The block at a place of the history. */
function historyHit(event) {
  const canvas = byId("segment-history"), at = pointer(event, canvas), { rank, axis, segment } = app, { address, size, start, end } = rank.blocks;
  const moment = axis.moment(axis.at(at.x, canvas.clientWidth));
  const place = segment.address + (1 - at.y / canvas.clientHeight) * (segment.end - segment.address);
  for (let i = 0; i < address.length; i++) {
    if (address[i] <= place && place < address[i] + size[i] && start[i] <= moment && moment < end[i]) return { moment, block: i };
  }
  return { moment, block: null };
}

function listenToSegments() {
  const canvas = byId("segments"), history = byId("segment-history");
  canvas.addEventListener("pointermove", segmentTip);
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const found = segmentHit(event);
    if (found === null) return select(null);
    app.segment = found.segment;
    select(found.block === null ? null : { block: found.block });
  });
  history.addEventListener("pointermove", (event) => {
    const { moment, block } = historyHit(event), { rank } = app;
    showTip(event, rank.momentText(moment) + (block === null ? "" : `\n${bytes(rank.blocks.size[block])}, ${rank.sites[rank.siteOf[block]]}`));
  });
  history.addEventListener("pointerleave", hideTip);
  history.addEventListener("click", (event) => {
    const { moment, block } = historyHit(event);
    setMoment(moment);
    select(block === null ? null : { block });
  });
}
