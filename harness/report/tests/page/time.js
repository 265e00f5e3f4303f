// Added to the page by the test that looks at its speed: times what it does at once, before the page counts as loaded.

const ms = (work) => {
  const before = performance.now();
  work();
  return performance.now() - before;
};

function time() {
  const opened = ms(() => new Layers(new Rank(page.ranks[0]), null));
  const views = ["timeline", "segments", "flame", "pending"];
  const drawn = Object.fromEntries(views.map((view) => [view, ms(VIEWS[view])]));
  const zoomed = [];
  for (let turn = 0; turn < 10; turn++) {
    app.axis.zoom(0.6, app.axis.last * 0.7);
    zoomed.push(ms(drawTimeline));
  }
  app.axis.showAll();
  selectSegment(app.rank.segmentsAt(app.moment)[0]);
  return { opened, drawn, zoomed, history: ms(drawSegmentHistory), problems };
}

document.body.append(element("pre", { id: "seen" }, JSON.stringify(time())));
