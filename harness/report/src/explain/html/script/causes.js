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
  byId("notes").replaceChildren(...rank.notes.map((note) => element("li", {}, sentence(note))));
  showCauses();
  showCategories();
  showSuspects();
}

// What the sum of the causes is, by how it is known: a heading, and the name of the sum.
const TOTALS = {
  given: ["Where the device's memory is", "the device's memory"],
  recorded: ["Where the device's memory is", "the device's memory"],
  at_oom: ["Where the memory is that was reserved or free", "reserved, or free on the device"],
  reserved_only: ["Where the reserved memory is", "reserved"],
};

/** The causes as a bar and as a table. */
function showCauses() {
  const { rank } = app, share = (amount) => (rank.device_total > 0 ? (100 * amount) / rank.device_total : 0);
  const bar = element("div", { class: "bar", role: "img", "aria-label": "The causes of the table below as shares of their sum" });
  const [heading, sum] = TOTALS[rank.device_total_is];
  byId("causes-title").textContent = heading;
  const part = (kind, amount, name) => {
    const tip = `${name}: ${bytes(amount)} (${share(amount).toFixed(1)} %)`;
    const made = element("span", { class: kind, pointermove: (event) => showTip(event, tip), pointerleave: hideTip });
    made.style.flex = `${amount} 0 0`;
    bar.append(made);
    return made;
  };
  const rows = rank.causes.map(({ cause, about, bytes: amount, sites }) => {
    if (cause === "allocated") {
      for (const of of sites) part("site", of.bytes, `${about}, by ${of.site}`).style.background = siteColour(rank.sites.indexOf(of.site));
    } else if (amount > 0) {
      part(cause, amount, about);
    }
    const name = element("span", {}, element("span", { class: `cause ${cause}` }), about);
    return { cells: [name, bytes(amount), share(amount).toFixed(1) + " %", siteList(sites)], attributes: { "data-cause": cause, "data-bytes": String(amount) } };
  });
  const total = element("b", {}, bytes(rank.device_total));
  rows.push({ cells: [element("b", {}, sum), total, rank.device_total > 0 ? "100 %" : "", ""] });
  byId("causes").replaceChildren(bar, table([["cause"], ["bytes", "number"], ["share", "number"], ["call sites"]], rows));
}

function showCategories() {
  const { categories } = app.rank;
  byId("categories-section").hidden = categories.length === 0;
  const rows = categories.map(({ category, about, bytes: amount, peak_bytes, sites }) => ({
    cells: [about, bytes(amount), bytes(peak_bytes), siteList(sites)],
    attributes: { "data-category": category, "data-bytes": String(amount) },
  }));
  byId("categories").replaceChildren(table([["category"], ["bytes", "number"], ["at the peak", "number"], ["call sites"]], rows));
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
  if (waiting.length > 0) byId("pending").append(table([["block", "number"], ["call site"], ["stream"], ["has waited"]], rows));
  if (rank.waits.length > 0) byId("pending").append(element("p", {}, "The longest waits that ended before:"), longestWaits());
}

/** Waits that are over, with a link to the moment at which each began. */
function longestWaits() {
  const { rank } = app;
  const rows = rank.waits.map(({ site, size, freed, end }) => {
    const began = link({}, () => setMoment(freed), rank.momentText(freed));
    return { cells: [bytes(size), siteByName(site), began, `${count(end - freed)} events` + (rank.times === null ? "" : `, ${duration(rank.secondsAt(end) - rank.secondsAt(freed))}`)] };
  });
  return table([["requested", "number"], ["call site"], ["freed at"], ["waited"]], rows);
}

/** A link that selects a block. */
function blockLink(block, text) {
  return link({ "data-block": String(block) }, () => select({ block }), text);
}

/** The folder that all files lie in, with the slash behind it; nothing where there is none. */
function commonFolder(names) {
  const [first] = names, ends = first.split("").map((letter, i) => (letter === "/" ? i + 1 : 0));
  return first.slice(0, Math.max(...ends.filter((end) => names.every((name) => name.startsWith(first.slice(0, end)))), 0));
}

/** All ranks in one table, where there are several. */
function showOverview() {
  if (page.ranks.length < 2) return;
  byId("overview").hidden = false;
  byId("rank-choice").hidden = false;
  const folder = commonFolder(page.ranks.map((rank) => rank.name)), short = (rank) => rank.name.slice(folder.length);
  const choose = (index) => link({}, () => showRank(index), short(page.ranks[index]));
  const rows = page.ranks.map((rank, index) => ({
    attributes: { "data-rank": String(index) },
    cells: [choose(index), rank.is_oom ? "out of memory" : "ended well", bytes(rank.allocated), bytes(rank.pending), bytes(rank.reserved), bytes(rank.peak_allocated), bytes(rank.peak_reserved), rank.headline],
  }));
  const columns = [["rank"], ["end"], ["allocated", "number"], ["waiting", "number"], ["reserved", "number"], ["peak allocated", "number"], ["peak reserved", "number"], ["in one sentence"]];
  byId("overview-body").replaceChildren(...page.overview.map((text) => element("p", {}, text.replaceAll(folder, ""))), table(columns, rows));
  byId("rank").replaceChildren(...page.ranks.map((rank, index) => element("option", { value: String(index) }, short(rank))));
}

/** What is selected, in words, in the bar below the page. */
function showSelection() {
  const { rank, moment, selection } = app, text = byId("selection-text");
  byId("selection").hidden = selection.site === null;
  for (const marked of document.querySelectorAll("[data-site], [data-block]")) {
    const { site, block } = marked.dataset;
    marked.classList.toggle("selected", selection.site !== null && (site === String(selection.site) || block === String(selection.block)));
  }
  if (selection.site === null) return;
  const { bytes: amount, blocks } = rank.sitesAt(moment)[selection.site];
  const pending = rank.pendingOf(selection.site, moment);
  const peak = rank.stacks.filter((stack) => stack.site === selection.site).reduce((sum, stack) => sum + stack.at_peak, 0);
  text.replaceChildren(element("p", {}, siteLink(selection.site), `: ${bytes(amount)} allocated in ${count(blocks)} ${blocks === 1 ? "block" : "blocks"} at ${rank.momentText(moment)}${pending > 0 ? `, ${bytes(pending)} freed but waiting for events` : ""}; ${bytes(peak)} at the peak.`));
  if (selection.block !== null) text.append(...blockWords(selection.block));
}

function blockWords(block) {
  const { rank } = app, { address, size, requested, start, freed, end, stream, stack } = rank.blocks;
  const when = (moment, never) => (moment > rank.events ? never : moment === 0 ? "before the recording" : `at ${rank.momentText(moment)}`);
  const life = `Allocated ${when(start[block], "")}, freed ${when(freed[block], "never")}` + (end[block] !== freed[block] ? `, usable again ${when(end[block], "not yet")}` : "");
  const frames = rank.stacks[stack[block]].frames.map((frame) => rank.frames[frame]).reverse();
  const lines = frames.map(([name, file, line]) => element("li", {}, element("code", {}, `${name}  ${file}:${line}`)));
  return [
    element("p", {}, `Block of ${bytes(size[block])} (${count(requested[block])} B requested) at ${rank.addressText(address[block])}, ${rank.streamText(stream[block])}. ${life}.`),
    lines.length === 0 ? element("p", { class: "hint" }, "No frames were recorded.") : element("details", {}, element("summary", {}, `${lines.length} frames, the innermost first`), element("ol", {}, ...lines)),
  ];
}
