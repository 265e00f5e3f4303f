// Added to the page by the test: uses it as a person would, and leaves what it saw as JSON.

const settle = (count = 2) => new Promise((done) => {
  const next = (left) => (left === 0 ? done() : requestAnimationFrame(() => next(left - 1)));
  next(count);
});

const at = (canvas, x, y) => {
  const box = canvas.getBoundingClientRect();
  return { clientX: box.left + x * box.width, clientY: box.top + y * box.height, pointerId: 1, bubbles: true, cancelable: true };
};

/** How many pixels of a canvas are painted. */
function painted(id) {
  const canvas = byId(id), { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let pixels = 0;
  for (let i = 3; i < data.length; i += 4) if (data[i] > 0) pixels++;
  return pixels;
}

async function drive() {
  const seen = {}, { rank } = app;
  const timeline = byId("timeline");
  // No pointer is down in a browser without a window.
  timeline.setPointerCapture = () => {};
  await settle();
  seen.headline = byId("headline").textContent;
  seen.causes = [...document.querySelectorAll("#causes tr[data-cause]")].map((row) => [row.dataset.cause, Number(row.dataset.bytes)]);
  seen.device_total = rank.device_total;
  seen.events = rank.events;
  seen.moment = app.moment;
  seen.figures = [rank.allocatedAt[app.moment], rank.pendingAt[app.moment], rank.reservedAt[app.moment]];
  seen.end = [rank.allocatedAt[rank.events], rank.pendingAt[rank.events], rank.reservedAt[rank.events]];
  seen.peak = [rank.peak_moment, rank.allocatedAt[rank.peak_moment], rank.allocatedAt.reduce((most, amount) => Math.max(most, amount), 0)];
  seen.layers = [...app.layers.at(app.moment)].reduce((sum, amount) => sum + amount, 0);
  seen.pinned = Number(byId("pinned").dataset.bytes);
  seen.flame = Number(document.querySelector("#flame > button")?.dataset.value ?? 0);
  seen.rank_rows = document.querySelectorAll("tr[data-rank]").length;
  seen.painted = ["timeline", "segments"].map(painted);

  const range = () => [app.axis.from, app.axis.to];
  seen.all = range();
  for (let turn = 0; turn < 4; turn++) timeline.dispatchEvent(new WheelEvent("wheel", { ...at(timeline, 0.75, 0.5), deltaY: -240 }));
  await settle();
  seen.zoomed = range();
  timeline.dispatchEvent(new PointerEvent("pointerdown", at(timeline, 0.5, 0.5)));
  timeline.dispatchEvent(new PointerEvent("pointermove", at(timeline, 0.7, 0.5)));
  timeline.dispatchEvent(new PointerEvent("pointerup", at(timeline, 0.7, 0.5)));
  await settle();
  seen.panned = range();
  byId("zoom-all").click();
  await settle();
  seen.back = range();

  timeline.dispatchEvent(new PointerEvent("pointerdown", at(timeline, 0.5, 0.02)));
  timeline.dispatchEvent(new PointerEvent("pointerup", at(timeline, 0.5, 0.02)));
  await settle();
  seen.clicked_moment = [app.moment, byId("moment-text").textContent];
  timeline.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  await settle();
  seen.next_moment = app.moment;
  if (!byId("by-time").disabled) byId("by-time").click();
  await settle();
  seen.by_time = app.axis.byTime;
  byId("moment-explained").click();
  await settle();

  // A block that is selected among the segments is marked in the other views and in the texts.
  const segment = app.drawn.segments.lanes.flatMap((lane) => lane.segments).find((segment) => segment.blocks.length > 0);
  if (segment) {
    const block = segment.blocks[0];
    select({ block });
    await settle();
    seen.selected = {
      site: rank.sites[rank.siteOf[block]],
      bar: byId("selection").hidden ? "" : byId("selection-text").textContent,
      links: document.querySelectorAll("a.selected").length,
      flame: document.querySelectorAll("#flame > button.match").length,
      history: byId("segment").hidden ? 0 : painted("segment-history"),
    };
    byId("selection-clear").click();
    await settle();
    seen.cleared = byId("selection").hidden;
  }
  const narrow = [...document.querySelectorAll("#flame > button")].at(-1);
  narrow?.click();
  byId("flame-life").click();
  await settle();
  seen.life = Number(document.querySelector("#flame > button")?.dataset.value ?? 0);

  if (page.ranks.length > 1) {
    seen.choices = [...byId("rank").options].map((option) => option.textContent);
    byId("rank").value = "1";
    byId("rank").dispatchEvent(new Event("change"));
    await settle();
    seen.other_rank = [byId("file").textContent, app.rank.events, document.querySelectorAll("tr.chosen").length];
  }
  seen.wide = document.documentElement.scrollWidth <= window.innerWidth;
  return seen;
}

drive().catch((error) => { problems.push(String(error.stack ?? error)); return {}; }).then((seen) => {
  document.body.append(element("pre", { id: "seen" }, JSON.stringify({ ...seen, problems })));
});
