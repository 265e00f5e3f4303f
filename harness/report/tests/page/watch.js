// Added before everything else: notes whatever goes wrong.

const problems = [];
window.addEventListener("error", (event) => problems.push(`${event.message} at ${event.lineno}`));
window.addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", (event) => problems.push(`${event.violatedDirective}: ${event.blockedURI}`));
for (const level of ["error", "warn"]) {
  const log = console[level];
  console[level] = (...texts) => {
    problems.push(texts.join(" "));
    log(...texts);
  };
}
// Without a window there may be no frames to wait for.
window.requestAnimationFrame = (draw) => setTimeout(() => draw(performance.now()), 1);
