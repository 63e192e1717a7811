// The page's loop: request the status once a second while the page is visible, and show it.

import * as actions from "./actions.js";
import { Charts, GAINS, load, usesOf } from "./charts.js";
import { $ } from "./dom.js";
import { duration, moment } from "./format.js";
import { showFacts, showGain, showHost, showStores, showVerdict } from "./panels.js";
import { History } from "./series.js";
import { Refusal, ask, hasToken, useToken } from "./source.js";
import { showDetails, showEngines, showEvents, showLeases, showUsers } from "./tables.js";

/** Delay between an answer and the next request. */
const PAUSE_MS = 1000;
/** A longer gap between two statuses is filled from the server's history. */
const GAP_S = 10;
const LEASES_S = 10;

const history = new History();
let gains = null;
let uses = null;
let status = null; // the latest one that could be shown
let range_s = 900;
let boot = null; // of the server whose history this is
let lacksHistory = true; // points are missing
let listed = { boot: "", at_s: 0 }; // when the leases were last requested, by the status's uptime
let following = new AbortController(); // of the current request
let waiting = 0; // the timer until the next one

/** Request the status, show it or why there is none, and go on after a while. The latest call wins. */
async function follow() {
  clearTimeout(waiting);
  following.abort();
  const mine = (following = new AbortController());
  if (document.hidden) return; // `visibilitychange` continues
  try {
    await take(await ask("v1/status", mine), mine);
  } catch (problem) {
    if (mine === following) tryTo(() => showFailure(explain(problem)));
  }
  if (mine === following) waiting = setTimeout(follow, PAUSE_MS);
}

async function take(next, stop) {
  const gap_s = next.point.time_s - history.end_s;
  lacksHistory ||= next.boot !== boot || gap_s < 0 || gap_s > GAP_S; // some are missing, or a clock was set
  boot = next.boot;
  if (lacksHistory) await recall(next, stop);
  else if (gap_s) history.add(next.point);
  if (stop === following) tryTo(() => show(next));
}

/** Stale figures must not look healthy. */
function tryTo(task) {
  try {
    task();
  } catch (problem) {
    console.error(problem);
    showFailure({ headline: "Page error", concerns: [{ what: `This page cannot show the server's status: ${problem.message}`, advice: "" }] });
  }
}

/** Get the server's history. Without it, charts continue with the points they have; if it got lost, it is requested again. */
async function recall(next, stop) {
  try {
    history.join(await ask("v1/history", stop), next.point.time_s);
    lacksHistory = false;
  } catch (problem) {
    if (stop.signal.aborted || (problem instanceof Refusal && problem.status === 401)) throw problem;
    lacksHistory = !(problem instanceof Refusal);
    if (next.point.time_s > history.end_s) history.add(next.point);
  }
}

function explain(problem) {
  if (problem instanceof Refusal && problem.status === 401) {
    const advice = "Run kvdepot status --http on the server's machine: it prints this page's URL with the token.";
    return {
      level: "wait",
      headline: hasToken() ? "Wrong token" : "Token required",
      concerns: [{ what: "", advice }],
      asksToken: true,
    };
  }
  const advice = "Engines recompute everything until it is back. To diagnose, run kvdepot doctor on its machine.";
  if (!(problem instanceof Refusal)) {
    return { headline: "Not reachable", concerns: [{ what: `No answer from ${location.host}; retrying every second.`, advice }] };
  }
  return { headline: problem.status >= 500 ? "Not answering" : "Refused", concerns: [{ what: sentence(problem.message), advice }] };
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function show(next) {
  if (status && status.version !== next.version) location.reload(); // another version of the server, and of the page
  const began = moment(next.point.time_s - next.uptime_s, next.wall_s);
  showVerdict(next.health, `version ${next.version}, since ${began} (${duration(Math.floor(next.uptime_s))})`);
  const name = showHost(next);
  document.title = next.health.level === "good" ? `${name} · kvdepot` : `${next.health.headline} · ${name} · kvdepot`;
  for (const part of [showFacts, showGain, showStores, showUsers, showEngines, showEvents, showDetails]) part(next, history);
  status = next; // it could be shown
  document.body.classList.add("known");
  document.body.classList.remove("old");
  $("token").hidden = true;
  showCharts();
  listLeases();
}

function showFailure({ level = "bad", headline, concerns, asksToken = false }) {
  showVerdict({ level, headline, concerns }, status ? `The figures below are from ${moment(status.wall_s, Date.now() / 1000)}.` : "");
  document.title = `${headline} · ${$("host").textContent || location.host} · kvdepot`;
  document.body.classList.toggle("old", status !== null);
  $("token").hidden = !asksToken;
}

function showCharts() {
  if (!status || !gains) return;
  gains.update(GAINS, history, range_s);
  uses.update(usesOf(status), history, range_s);
}

/** Request the leases, which the server lists on request, and show them, now and then while they can be seen. */
async function listLeases() {
  const isFresh = listed.boot === status.boot && status.uptime_s - listed.at_s < LEASES_S;
  if (isFresh || !$("users").open) return;
  listed = { boot: status.boot, at_s: status.uptime_s };
  // One that fails is requested again; the status shows whether the server works.
  await ask("v1/leases").then(showLeases).catch(() => {});
}

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken($("token-value").value.trim());
  $("token-value").value = "";
  follow();
});
$("range").addEventListener("change", (event) => {
  range_s = Number(event.target.value);
  showCharts();
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-action]");
  if (button && status) actions.open(button.dataset.action, button.dataset.of ?? "", status);
});
addEventListener("colours", () => {
  gains?.recolour();
  uses?.recolour();
  showCharts();
});
document.addEventListener("visibilitychange", follow);

const isWide = matchMedia("(min-width: 48rem)").matches;
for (const fold of document.querySelectorAll(".fold")) {
  fold.open = isWide && fold.dataset.open === "wide";
  fold.addEventListener("toggle", () => {
    showCharts(); // those that were hidden have no size
    if (status) listLeases();
  });
}
range_s = Number($("range").querySelector("input:checked").value); // browsers restore it on a reload
const uPlot = await load();
$("charts-missing").hidden = uPlot !== null;
gains = new Charts(uPlot, $("gain"));
uses = new Charts(uPlot, $("charts"));
follow();
