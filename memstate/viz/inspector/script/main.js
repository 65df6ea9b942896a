// Sets the theme, and draws the page for the first time.
(() => {
  const THEMES = ["auto", "light", "dark"],
    button = $("#theme"),
    root = document.documentElement;
  const redraw = () => {
    map.draw();
    timeline.draw();
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(root.dataset.theme || "auto") + 1) % 3];
    root.dataset.theme = next;
    button.textContent = `theme: ${next}`;
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let before = "";
  addEventListener("beforeprint", () => {
    before = root.dataset.theme || "auto";
    root.dataset.theme = "light";
    redraw();
  });
  addEventListener("afterprint", () => {
    root.dataset.theme = before;
    redraw();
  });
  search.start();
  map.start();
  tree.draw();
  timeline.draw();
  new ResizeObserver(() => later(timeline.draw, 50)).observe($("#timeline"));
})();
