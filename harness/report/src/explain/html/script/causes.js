// The texts: headline, facts, causes, ranks, lists, notes, and what is selected.

function showTexts() {
  const { rank } = app;
  byId("file").textContent = `${rank.name} · device ${rank.device}`;
  byId("headline").replaceChildren(sentence(rank.headline));
  byId("details").replaceChildren(...rank.details.map((text) => element("p", {}, sentence(text))));
  const facts = [
    ["Allocated", bytes(rank.allocated)],
    ["Freed, waiting for events", bytes(rank.pending)],
    ["Reserved", bytes(rank.reserved)],
    ["Peak allocated", bytes(rank.peak_allocated)],
    ["Peak reserved", bytes(rank.peak_reserved)],
    ["Events", count(rank.events)],
    ["Settings", rank.settings === null ? "not recorded" : rank.settings || "default"],
  ];
  byId("facts").replaceChildren(...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  byId("notes").replaceChildren(...rank.notes.map((note) => element("li", {}, note)));
  showCauses();
  showSuspects();
}

/** The causes as a bar and as a table. */
function showCauses() {
  const { rank } = app, share = (amount) => (rank.device_total > 0 ? (100 * amount) / rank.device_total : 0);
  const bar = element("div", { class: "bar", role: "img", "aria-label": "The causes of the table below as shares of the device's memory" });
  const rows = rank.causes.map((cause, index) => {
    const swatch = element("span", { class: "swatch" });
    swatch.style.background = CAUSE_COLOURS[index % CAUSE_COLOURS.length];
    if (cause.bytes > 0) {
      const tip = `${cause.about}: ${bytes(cause.bytes)} (${share(cause.bytes).toFixed(1)} %)`;
      const part = element("span", { pointermove: (event) => showTip(event, tip), pointerleave: hideTip });
      part.style.cssText = `flex: ${cause.bytes} 0 0; background: ${swatch.style.background}`;
      bar.append(part);
    }
    const name = element("span", {}, swatch, cause.about);
    return { cells: [name, bytes(cause.bytes), share(cause.bytes).toFixed(1) + " %", siteList(cause.sites)], attributes: { "data-cause": cause.cause, "data-bytes": String(cause.bytes) } };
  });
  const total = element("b", {}, bytes(rank.device_total));
  rows.push({ cells: [element("b", {}, "the device's memory"), total, rank.device_total > 0 ? "100 %" : "", ""] });
  byId("causes").replaceChildren(bar, table([["cause"], ["bytes", "number"], ["share", "number"], ["call sites"]], rows));
}

/** The first call sites, and the others when they are asked for. */
function siteList(sites) {
  const SHOWN = 3;
  const line = ({ site, bytes: amount, blocks }) =>
    element("div", {}, siteByName(site), ` ${bytes(amount)} in ${count(blocks)} ${blocks === 1 ? "block" : "blocks"}`);
  const list = element("div", {}, ...sites.slice(0, SHOWN).map(line));
  if (sites.length > SHOWN) {
    const more = sites.slice(SHOWN);
    const sum = more.reduce((sum, site) => sum + site.bytes, 0);
    list.append(element("details", {}, element("summary", {}, `${count(more.length)} more, ${bytes(sum)}`), ...more.map(line)));
  }
  return list;
}

function showSuspects() {
  const { suspects } = app.rank;
  const rows = suspects.map(({ site, grown, held }) => ({ cells: [siteByName(site), bytes(grown), held.map(bytes).join(", ")] }));
  byId("suspects").replaceChildren(
    suspects.length === 0
      ? element("p", { class: "hint" }, "No call site holds more and more, or the recording has too few iterations to tell.")
      : table([["call site"], ["grown by", "number"], ["held at the lowest point of each iteration"]], rows),
  );
}

/** Blocks that are freed at the moment, and wait for other streams: the most bytes first. */
function showPending() {
  const { rank, moment } = app, { size, freed, stream } = rank.blocks, MOST = 20;
  const waiting = rank.blocksAt(moment).filter((block) => !rank.isAllocated(block, moment)).sort((a, b) => size[b] - size[a]);
  const age = (block) => {
    const events = `${count(moment - freed[block])} events`;
    const since = rank.secondsAt(moment) - rank.secondsAt(freed[block]);
    return freed[block] === 0 ? "before the recording" : rank.times === null ? events : `${events}, ${duration(since)}`;
  };
  const rows = waiting.slice(0, MOST).map((block) => ({
    cells: [blockLink(block, bytes(size[block])), siteLink(rank.siteOf[block]), rank.streamText(stream[block]), age(block)],
  }));
  const text = waiting.length === 0
    ? "No freed block waits at this moment."
    : `${bytes(rank.pendingAt[moment])} in ${count(waiting.length)} ${waiting.length === 1 ? "block" : "blocks"} cannot be used again at ${rank.momentText(moment)}: other streams may still work on them.`
      + (waiting.length > MOST ? ` The ${MOST} largest:` : "");
  byId("pending").replaceChildren(element("p", {}, text));
  if (waiting.length > 0) byId("pending").append(table([["block", "number"], ["call site"], ["stream"], ["waits since"]], rows));
  if (rank.waits.length > 0) byId("pending").append(element("p", {}, "The longest waits that ended before:"), longestWaits());
}

/** Waits that are over, with a link to the moment at which each began. */
function longestWaits() {
  const { rank } = app;
  const rows = rank.waits.map(({ site, size, freed, end }) => {
    const began = element("button", { class: "site", click: () => setMoment(freed) }, rank.momentText(freed));
    return { cells: [bytes(size), siteByName(site), began, `${count(end - freed)} events` + (rank.times === null ? "" : `, ${duration(rank.secondsAt(end) - rank.secondsAt(freed))}`)] };
  });
  return table([["requested", "number"], ["call site"], ["freed at"], ["waited"]], rows);
}

/** A link that selects a block. */
function blockLink(block, text) {
  return element("button", { class: "site", "data-block": String(block), click: () => select({ block }) }, text);
}

/** All ranks in one table, where there are several. */
function showOverview() {
  if (page.ranks.length < 2) return;
  byId("overview").hidden = false;
  byId("rank-choice").hidden = false;
  const choose = (index) => element("button", { class: "site", click: () => showRank(index) }, page.ranks[index].name);
  const rows = page.ranks.map((rank, index) => ({
    attributes: { "data-rank": String(index) },
    cells: [choose(index), rank.is_oom ? "out of memory" : "ended well", bytes(rank.allocated), bytes(rank.pending), bytes(rank.reserved), bytes(rank.peak_allocated), bytes(rank.peak_reserved), rank.headline],
  }));
  const columns = [["rank"], ["end"], ["allocated", "number"], ["waiting", "number"], ["reserved", "number"], ["peak allocated", "number"], ["peak reserved", "number"], ["in one sentence"]];
  byId("overview-body").replaceChildren(...page.overview.map((text) => element("p", {}, text)), table(columns, rows));
  byId("rank").replaceChildren(...page.ranks.map((rank, index) => element("option", { value: String(index) }, rank.name)));
}

/** What is selected, in words, in the bar below the page. */
function showSelection() {
  const { rank, moment, selection } = app, text = byId("selection-text");
  byId("selection").hidden = selection.site === null;
  for (const link of document.querySelectorAll("button.site")) {
    const { site, block } = link.dataset;
    link.classList.toggle("selected", selection.site !== null && (site === String(selection.site) || block === String(selection.block)));
  }
  if (selection.site === null) return;
  const { bytes: amount, blocks } = rank.sitesAt(moment)[selection.site];
  const peak = rank.stacks.filter((stack) => stack.site === selection.site).reduce((sum, stack) => sum + stack.at_peak, 0);
  text.replaceChildren(element("p", {}, siteLink(selection.site), `: ${bytes(amount)} allocated in ${count(blocks)} ${blocks === 1 ? "block" : "blocks"} at ${rank.momentText(moment)}, ${bytes(peak)} at the peak.`));
  if (selection.block !== null) text.append(...blockWords(selection.block));
}

function blockWords(block) {
  const { rank } = app, { address, size, requested, start, freed, end, stream, stack } = rank.blocks;
  const when = (moment, never) => (moment > rank.events ? never : moment === 0 ? "before the recording" : `at ${rank.momentText(moment)}`);
  const life = `Allocated ${when(start[block], "")}, freed ${when(freed[block], "never")}` + (end[block] !== freed[block] ? `, free for others ${when(end[block], "not yet")}` : "");
  const frames = rank.stacks[stack[block]].frames.map((frame) => rank.frames[frame]).reverse();
  const lines = frames.map(([name, file, line]) => element("li", {}, element("code", {}, `${name}  ${file}:${line}`)));
  return [
    element("p", {}, `Block of ${bytes(size[block])} (${count(requested[block])} B requested) at ${rank.addressText(address[block])}, ${rank.streamText(stream[block])}. ${life}.`),
    lines.length === 0 ? element("p", { class: "hint" }, "No frames were recorded.") : element("details", {}, element("summary", {}, `${lines.length} frames, the innermost first`), element("ol", {}, ...lines)),
  ];
}
