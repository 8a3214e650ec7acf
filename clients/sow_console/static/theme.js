// Dark or light: as the system has it, or as the person chose. Loaded before the page is drawn, so that it does not flash.
// @ts-check
(() => {
  const NAME = "sow-theme";
  const kept = localStorage.getItem(NAME);
  if (kept) document.documentElement.dataset["theme"] = kept;
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme")?.addEventListener("click", () => {
      const root = document.documentElement;
      const dark = root.dataset["theme"] ? root.dataset["theme"] === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset["theme"] = dark ? "light" : "dark";
      localStorage.setItem(NAME, root.dataset["theme"]);
    });
  });
})();
