// The page's loop: request the next status while the page is visible, and show it. The server has one each second, and
// then answers all pages.

import { CHARTS, Chart, load } from "./charts.js";
import { $ } from "./dom.js";
import { duration, moment } from "./format.js";
import { RECENT_S, verdict } from "./health.js";
import { showAll, showVerdict } from "./panels.js";
import { History, point } from "./series.js";
import { Refusal, ask, hasToken, useToken } from "./source.js";

/** Delay before the next request if there was no response, or no new status. */
const PAUSE_MS = 1000;
/** After this long without a status, or if a clock was set by this much, the history is requested again. */
const GAP_S = 5;

const history = new History();
let charts = [];
let status = null; // the latest one
let began_s = 0; // start of the server, by the clock of its history
let range_s = 900;
let seen = null; // the number of its turn, even if it could not be shown
let asking = new AbortController(); // of the current request
let waiting = 0; // the timer until the next request

async function turn() {
  clearTimeout(waiting);
  asking.abort(); // the latest request wins
  const mine = (asking = new AbortController());
  if (document.hidden) return; // `visibilitychange` continues
  let next = null;
  let failure = null;
  try {
    next = await ask(seen === null ? "v1/status" : `v1/status?after=${seen}`, mine);
    if (!follows(next)) await recall(next, mine);
  } catch (problem) {
    failure = explain(problem);
  }
  if (mine !== asking) return;
  waiting = setTimeout(turn, failure || next.turn === seen ? PAUSE_MS : 0);
  if (!failure) seen = next.turn;
  try {
    if (failure) showFailure(failure);
    else show(next);
  } catch (problem) {
    console.error(problem); // stale figures must not look healthy
    showFailure({ headline: "Page error", reasons: [`This page cannot show the server's status: ${problem.message}`] });
  }
}

/** Whether charts may connect the latest status with this one. */
function follows(next) {
  if (status?.boot !== next.boot || Math.abs(began_s + next.uptime_s - next.wall_s) >= GAP_S) return false;
  return next.uptime_s >= status.uptime_s && next.uptime_s - status.uptime_s < GAP_S;
}

/** Get the server's history. Without it, charts continue with the points they have. */
async function recall(next, stop) {
  began_s = next.wall_s - next.uptime_s;
  try {
    history.join(await ask("v1/history", stop), next.wall_s);
    // Its points have exact times, the status has that of the last tick; the next point must be later than both.
    if (Math.abs(history.end_s - next.wall_s) < GAP_S) began_s = Math.max(history.end_s, next.wall_s) - next.uptime_s;
  } catch (problem) {
    if (problem instanceof Refusal && problem.status === 401) throw problem;
  }
}

function explain(problem) {
  if (problem instanceof Refusal && problem.status === 401) {
    const help = "Run kvdepot open on the server's machine: it prints this page's URL with the token. kvdepot token prints the token alone.";
    return {
      level: "wait",
      headline: hasToken() ? "Wrong token" : "Token required",
      reasons: [help],
      asksToken: true,
    };
  }
  const help = "Engines recompute everything until it is back. To diagnose, run kvdepot doctor on its machine.";
  if (!(problem instanceof Refusal)) {
    return { headline: "Not reachable", reasons: [`No answer from ${location.host}; retrying every second.`, help] };
  }
  return { headline: problem.status >= 500 ? "Not answering" : "Refused", reasons: [sentence(problem.message), help] };
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function show(next) {
  if (status && status.version !== next.version) location.reload(); // another version of the server, and of the page
  if (follows(next) && next.uptime_s > status.uptime_s) history.add(began_s + next.uptime_s, point(status, next));
  const began = moment(began_s, next.wall_s);
  const since = `version ${next.version}, since ${began} (${duration(Math.floor(next.uptime_s))})`;
  const slow = next.trouble ? sentence(next.trouble) : "";
  showVerdict(verdict(next, slow, history.total("dropped_chunks_s", RECENT_S)), since);
  showAll(next);
  status = next; // it could be shown
  document.body.classList.add("known");
  document.body.classList.remove("old");
  $("token").hidden = true;
  showCharts();
}

function showFailure({ level = "bad", headline, reasons, asksToken = false }) {
  showVerdict({ level, headline, reasons }, status ? `The figures below are from ${moment(status.wall_s, Date.now() / 1000)}.` : "");
  document.body.classList.toggle("old", status !== null);
  $("token").hidden = !asksToken;
}

function showCharts() {
  if (status) for (const chart of charts) chart.update(history, status, range_s);
}

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken($("token-value").value.trim());
  $("token-value").value = "";
  turn();
});
$("range").addEventListener("change", (event) => {
  range_s = Number(event.target.value);
  showCharts();
});
addEventListener("colours", () => {
  for (const chart of charts) chart.recolour();
  showCharts();
});
document.addEventListener("visibilitychange", turn);

range_s = Number($("range").querySelector("input:checked").value); // browsers restore it on a reload
const uPlot = await load();
$("charts-missing").hidden = uPlot !== null;
charts = CHARTS.map((spec) => new Chart(uPlot, spec));
$("charts").append(...charts.map((chart) => chart.element));
await turn();
