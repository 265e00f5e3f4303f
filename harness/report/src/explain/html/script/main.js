// What is shown, and what is drawn again when it changes.

const app = {
  rank: null,
  layers: null,
  axis: null,
  moment: 0,
  /** What is selected: a site, and perhaps one of its blocks. */
  selection: { site: null, block: null },
  /** The segment whose history is shown. */
  segment: null,
  /** What the flame graph weighs: peak, moment or life. */
  weight: "peak",
  /** Frames from the root to the one that fills the flame graph. */
  flamePath: [],
  /** What the views remember of their last drawing, to know what the pointer is on. */
  drawn: {},
  ranks: new Map(),
};

const VIEWS = { timeline: drawTimeline, segments: drawSegments, segment: drawSegmentHistory, flame: drawFlame, pending: showPending, selection: showSelection };
const waiting = new Set();

/** Has views drawn again, once, before the next frame. */
function redraw(...views) {
  if (waiting.size === 0) requestAnimationFrame(draw);
  for (const view of views.length === 0 ? Object.keys(VIEWS) : views) waiting.add(view);
}

function draw() {
  const views = Object.keys(VIEWS).filter((view) => waiting.has(view));
  waiting.clear();
  for (const view of views) VIEWS[view]();
}

function showRank(index) {
  if (!app.ranks.has(index)) app.ranks.set(index, new Rank(page.ranks[index]));
  app.rank = app.ranks.get(index);
  app.layers = new Layers(app.rank, null);
  app.axis = new Axis(app.rank, false);
  app.selection = { site: null, block: null };
  app.segment = null;
  app.flamePath = [];
  byId("rank").value = String(index);
  for (const row of document.querySelectorAll("tr[data-rank]")) row.classList.toggle("chosen", row.dataset.rank === String(index));
  byId("moment").max = String(app.rank.events);
  byId("moment-explained").textContent = app.rank.is_oom ? "when it ran out" : "at the end";
  byId("by-time").disabled = !new Axis(app.rank, true).byTime;
  press("by-event", "by-event", "by-time");
  showTexts();
  showLegend();
  setMoment(app.rank.moment);
  redraw();
}

function setMoment(moment) {
  app.moment = Math.max(0, Math.min(moment, app.rank.events));
  byId("moment").value = String(app.moment);
  byId("moment-text").textContent = app.rank.momentText(app.moment);
  if (app.segment !== null) app.segment = segmentLike(app.segment);
  redraw("timeline", "segments", "segment", "pending", "selection", ...(app.weight === "moment" ? ["flame"] : []));
}

/** The segment of the present moment that lies where the given one lay; that one where there is none. */
function segmentLike(segment) {
  return app.rank.segmentsAt(app.moment).find(({ address, end }) => address < segment.end && end > segment.address) ?? segment;
}

/** Selects a site, or a block with its site and segment; nothing with `null`. */
function select(what) {
  const { rank, selection } = app;
  const block = what?.block ?? null;
  selection.block = block;
  selection.site = what === null ? null : block !== null ? rank.siteOf[block] : what.site;
  if (block !== null) {
    const at = rank.blocks.address[block];
    app.segment = rank.segmentsAt(app.moment).find(({ address, end }) => address <= at && at < end) ?? app.segment;
  }
  if (app.layers.extra !== null || (selection.site ?? 0) >= SITE_COLOURS.length) {
    app.layers = new Layers(rank, selection.site);
    showLegend();
  }
  redraw();
}

function selectSegment(segment) {
  app.segment = segment;
  redraw("segments", "segment");
}

function listen() {
  listenToTimeline();
  listenToSegments();
  listenToFlame();
  byId("rank").addEventListener("change", (event) => showRank(Number(event.target.value)));
  byId("moment").addEventListener("input", (event) => setMoment(Number(event.target.value)));
  byId("moment-back").addEventListener("click", () => setMoment(app.moment - 1));
  byId("moment-forward").addEventListener("click", () => setMoment(app.moment + 1));
  byId("moment-peak").addEventListener("click", () => setMoment(app.rank.peak_moment));
  byId("moment-explained").addEventListener("click", () => setMoment(app.rank.moment));
  byId("selection-clear").addEventListener("click", () => select(null));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") select(null); });
  // A canvas does not follow the style sheet by itself.
  window.addEventListener("resize", () => redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
  for (const moment of ["beforeprint", "afterprint"]) {
    window.addEventListener(moment, () => {
      // Paper is light.
      document.documentElement.classList.toggle("printed", moment === "beforeprint");
      for (const view of Object.values(VIEWS)) view();
    });
  }
}

listen();
showOverview();
showRank(Math.max(0, page.ranks.findIndex((rank) => rank.is_oom)));
