// The page's loop: ask for the next status while somebody looks, and show it. The server has one each second, and
// answers all pages when it has.

import { CHARTS, Chart, load } from "./charts.js";
import { $ } from "./dom.js";
import { duration, moment } from "./format.js";
import { RECENT_S, verdict } from "./health.js";
import { showAll, showVerdict } from "./panels.js";
import { History, point } from "./series.js";
import { Refusal, ask, hasToken, useToken } from "./source.js";

/** Before asking again where there was no answer, or none that is new. */
const PAUSE_MS = 1000;
/** After so long without a status, or when a clock was set by so much, points are asked for again. */
const GAP_S = 5;

const history = new History();
let charts = [];
let status = null; // the latest that came
let began_s = 0; // when the server began, by the clock of the points that it kept
let range_s = 900;
let seen = null; // which turn of the server's asking that was, whether it could be shown or not
let asking = new AbortController(); // of the request under way
let waiting = 0; // the timer until the next request

async function turn() {
  clearTimeout(waiting);
  asking.abort(); // whoever asks later takes over
  const mine = (asking = new AbortController());
  if (document.hidden) return; // `visibilitychange` goes on
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
    console.error(problem); // figures that stand still must not say that all is well
    showFailure({ headline: "Page error", reasons: [`This page cannot show the server's status: ${problem.message}`] });
  }
}

/** Whether a line from the latest status to this one is true. */
function follows(next) {
  if (status?.boot !== next.boot || Math.abs(began_s + next.uptime_s - next.wall_s) >= GAP_S) return false;
  return next.uptime_s >= status.uptime_s && next.uptime_s - status.uptime_s < GAP_S;
}

/** What the server has kept of the time before. Without it charts go on with what is here. */
async function recall(next, stop) {
  began_s = next.wall_s - next.uptime_s;
  try {
    history.join(await ask("v1/history", stop), next.wall_s);
    // Its points have an exact time, the status that of the last tick: the next point comes after them.
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
  if (status && status.version !== next.version) location.reload(); // another server's page
  if (follows(next) && next.uptime_s > status.uptime_s) history.add(began_s + next.uptime_s, point(status, next));
  const began = moment(began_s, next.wall_s);
  const since = `version ${next.version}, since ${began} (${duration(Math.floor(next.uptime_s))})`;
  const slow = next.trouble ? sentence(next.trouble) : "";
  showVerdict(verdict(next, slow, history.total("dropped_chunks_s", RECENT_S)), since);
  showAll(next);
  status = next; // it can be shown
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

range_s = Number($("range").querySelector("input:checked").value); // browsers keep it over a reload
const uPlot = await load();
$("charts-missing").hidden = uPlot !== null;
charts = CHARTS.map((spec) => new Chart(uPlot, spec));
$("charts").append(...charts.map((chart) => chart.element));
await turn();
