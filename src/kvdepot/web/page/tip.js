// The whole of a short id, beside it while it has the focus or the pointer is over it.

import { $, say } from "./dom.js";

const tip = $("tip");
let shown = null; // the element that it belongs to

function show(event) {
  const of = event.target.closest?.("[data-full]");
  if (!of) return;
  shown = of;
  of.setAttribute("aria-describedby", "tip");
  say(tip, of.dataset.full);
  tip.hidden = false;
  place();
}

function place() {
  if (!shown) return;
  const at = shown.getBoundingClientRect();
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(at.left, room))}px`;
  tip.style.top = `${at.bottom + 4}px`;
}

function hide() {
  shown?.removeAttribute("aria-describedby");
  shown = null;
  tip.hidden = true;
}

for (const kind of ["focusin", "mouseover"]) document.addEventListener(kind, show);
for (const kind of ["focusout", "mouseout"]) document.addEventListener(kind, hide);
addEventListener("scroll", place, true); // also because the focus moved there
addEventListener("keydown", (event) => event.key === "Escape" && hide());
