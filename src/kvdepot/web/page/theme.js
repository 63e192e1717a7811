// The chosen colours, before anything is drawn: hence no module, and in the head.
"use strict";
(() => {
  const root = document.documentElement;
  const read = () => {
    try {
      return localStorage.getItem("theme") ?? "auto";
    } catch {
      return "auto"; // storage is forbidden here: the system's colours, then
    }
  };
  const show = (theme) => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    dispatchEvent(new Event("colours"));
  };
  show(read());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(read()));
  addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    for (const input of choice.querySelectorAll("input")) input.checked = input.value === read();
    choice.addEventListener("change", (event) => {
      try {
        localStorage.setItem("theme", event.target.value);
      } catch {
        // kept for as long as the page is open
      }
      show(event.target.value);
    });
  });
})();
