// The page's loop: ask for a status each second while somebody looks, and show it.

import { CHARTS, Chart, load } from "./charts.js";
import { $ } from "./dom.js";
import { clock, duration, moment } from "./format.js";
import { verdict } from "./health.js";
import { showAll, showVerdict } from "./panels.js";
import { History, point } from "./series.js";
import { Refusal, ask, useToken } from "./source.js";

const EVERY_MS = 1000;
/** After so long without a status its points are asked for again. */
const GAP_S = 5;

const history = new History();
let charts = [];
let status = null; // the latest that came
let changed_ms = 0; // when it last differed from the one before, on this machine's clock
let range_s = 900;
let waiting = 0; // the timer until the next request

async function turn() {
  clearTimeout(waiting);
  if (document.hidden) return; // `visibilitychange` goes on
  let next = null;
  let failure = null;
  try {
    next = await ask("v1/status");
    if (!follows(next)) await recall();
  } catch (problem) {
    failure = explain(problem);
  }
  clearTimeout(waiting); // of a turn that was under way at the same time
  waiting = setTimeout(turn, EVERY_MS); // before drawing, whose faults must not be the end
  if (!failure) accept(next);
  show(failure);
}

/** Whether a line from the latest status to this one is true. */
function follows(next) {
  return status?.boot === next.boot && next.wall_s >= status.wall_s && next.wall_s - status.wall_s < GAP_S;
}

function accept(next) {
  if (status && status.version !== next.version) location.reload(); // another server's page
  if (status?.wall_s !== next.wall_s) changed_ms = performance.now();
  if (follows(next) && next.wall_s > status.wall_s) history.add(next.wall_s, point(status, next));
  status = next;
}

/** What the server has kept of the time before. Without it charts begin now. */
async function recall() {
  try {
    history.restart(await ask("v1/history"));
  } catch (problem) {
    if (problem instanceof Refusal && problem.status === 401) throw problem;
  }
}

function explain(problem) {
  const isRefusal = problem instanceof Refusal;
  const needsToken = isRefusal && problem.status === 401;
  $("token").hidden = !needsToken;
  if (needsToken) {
    const reason = "Run kvdepot open on the server's machine: it opens this page with its token, which kvdepot token prints.";
    return { level: "wait", headline: "A token is needed", reasons: [reason] };
  }
  const old = status ? ` The figures below are of ${clock(status.wall_s)}.` : "";
  return isRefusal
    ? { headline: problem.status === 503 ? "Not answering" : "Refused", reasons: [`${sentence(problem.message)}${old}`] }
    : { headline: "Not reachable", reasons: [`No answer from ${location.host}; asking again each second.${old}`] };
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function show(failure) {
  document.body.classList.toggle("known", status !== null);
  document.body.classList.toggle("old", failure !== null && status !== null);
  const silent_s = (performance.now() - changed_ms) / 1000;
  const began = status ? status.wall_s - status.uptime_s : 0;
  const since = status && !failure ? `version ${status.version}, since ${moment(began, status.wall_s)} (${duration(Math.floor(status.uptime_s))})` : "";
  showVerdict(verdict(status, silent_s, failure), since);
  if (failure) return;
  $("token").hidden = true;
  showAll(status);
  for (const chart of charts) chart.update(history, status, range_s);
}

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken($("token-value").value.trim());
  $("token-value").value = "";
  turn();
});
$("range").addEventListener("change", (event) => {
  range_s = Number(event.target.value);
  if (status) for (const chart of charts) chart.update(history, status, range_s);
});
addEventListener("colours", () => {
  for (const chart of charts) chart.recolour();
  if (status) for (const chart of charts) chart.update(history, status, range_s);
});
document.addEventListener("visibilitychange", turn);

range_s = Number($("range").querySelector("input:checked").value); // browsers keep it over a reload
const uPlot = await load();
$("charts-missing").hidden = uPlot !== null;
charts = CHARTS.map((spec) => new Chart(uPlot, spec));
$("charts").append(...charts.map((chart) => chart.element));
await turn();
