// Applies the chosen colours before anything is drawn; hence it is not a module, and in the head.
"use strict";
(() => {
  const root = document.documentElement;
  const read = () => {
    try {
      return localStorage.getItem("theme") ?? "auto";
    } catch {
      return "auto"; // storage is forbidden here, so use the system's colours
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
        // storage is forbidden: it lasts as long as the page is open
      }
      show(event.target.value);
    });
  });
})();
