// The page's loop: request the next status while the page is visible, and show it. The server has one each second, and
// then answers all pages.

import * as actions from "./actions.js";
import { Charts, GAINS, load, usesOf } from "./charts.js";
import { $ } from "./dom.js";
import { duration, moment } from "./format.js";
import { showFacts, showGain, showHost, showStores, showVerdict } from "./panels.js";
import { History, point } from "./series.js";
import { Refusal, ask, hasToken, useToken } from "./source.js";
import { showDetails, showEngines, showEvents, showLeases, showPrefixes, showUsers } from "./tables.js";
import "./tip.js";

/** Delay before the next request if there was no response, or no new status. */
const PAUSE_MS = 1000;
/** After this long without a status, or if a clock was set by this much, the history is requested again. */
const GAP_S = 5;
const PREFIXES_S = 10;
const LEASES_S = 3;
const MOST_PREFIXES = 10;

const history = new History();
let gains = null;
let uses = null;
let status = null; // the latest one
let began_s = 0; // start of the server, by the clock of its history
let lacksHistory = false; // the last request for it got no response
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
    showFailure({ headline: "Page error", concerns: [{ what: `This page cannot show the server's status: ${problem.message}`, advice: "" }] });
  }
}

/** Whether charts may connect the latest status with this one. */
function follows(next) {
  if (lacksHistory || status?.boot !== next.boot || Math.abs(began_s + next.uptime_s - next.wall_s) >= GAP_S) return false;
  return next.uptime_s >= status.uptime_s && next.uptime_s - status.uptime_s < GAP_S;
}

/** Get the server's history. Without it, charts continue with the points they have; if it got lost, it is requested again. */
async function recall(next, stop) {
  lacksHistory = false;
  try {
    history.join(await ask("v1/history", stop), next.wall_s);
  } catch (problem) {
    if (problem instanceof Refusal && problem.status === 401) throw problem;
    lacksHistory = !(problem instanceof Refusal);
  }
  // Its points have exact times, the status has that of the last tick; the next point must be later than both.
  const isRecent = Math.abs(history.end_s - next.wall_s) < GAP_S;
  began_s = (isRecent ? Math.max(history.end_s, next.wall_s) : next.wall_s) - next.uptime_s;
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
  if (follows(next) && next.uptime_s > status.uptime_s) history.add(began_s + next.uptime_s, point(status, next));
  const began = moment(began_s, next.wall_s);
  showVerdict(next.health, `version ${next.version}, since ${began} (${duration(Math.floor(next.uptime_s))})`);
  const name = showHost(next);
  document.title = next.health.level === "good" ? `${name} · kvdepot` : `${next.health.headline} · ${name} · kvdepot`;
  for (const part of [showFacts, showGain, showStores, showUsers, showEngines, showEvents, showDetails]) part(next);
  status = next; // it could be shown
  document.body.classList.add("known");
  document.body.classList.remove("old");
  $("token").hidden = true;
  showCharts();
  for (const side of SIDES) side.look();
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

/** What changes slowly and is requested beside the status: while it can be seen, and until the server has none. */
class Side {
  #path;
  #every_s;
  #canBeSeen;
  #show;
  #at = -Infinity; // when it was requested, by the status's uptime
  #boot = "";
  #isGone = false;

  constructor(path, every_s, canBeSeen, show) {
    this.#path = path;
    this.#every_s = every_s;
    this.#canBeSeen = canBeSeen;
    this.#show = show;
  }

  /** Called with each status. */
  async look() {
    if (this.#boot !== status.boot) [this.#boot, this.#at, this.#isGone] = [status.boot, -Infinity, false];
    if (this.#isGone || !this.#canBeSeen() || status.uptime_s - this.#at < this.#every_s) return;
    this.#at = status.uptime_s;
    try {
      this.#isGone = this.#show(await ask(this.#path)) === false;
    } catch (problem) {
      if (problem instanceof Refusal && problem.status === 404) this.#isGone = true;
      // else it is requested again; the status shows whether the server works
    }
  }
}

const SIDES = [
  new Side(`v1/prefixes?most=${MOST_PREFIXES}&sort=hits`, PREFIXES_S, () => $("users").open, showPrefixes),
  new Side("v1/leases", LEASES_S, () => $("users").open, showLeases),
];

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
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-action]");
  if (button && status) actions.open(button.dataset.action, button.dataset.of ?? "", status);
});
addEventListener("colours", () => {
  gains?.recolour();
  uses?.recolour();
  showCharts();
});
document.addEventListener("visibilitychange", turn);

const isWide = matchMedia("(min-width: 48rem)").matches;
for (const fold of document.querySelectorAll(".fold")) {
  fold.open = isWide && fold.dataset.open === "wide";
  fold.addEventListener("toggle", () => {
    showCharts(); // those that were hidden have no size
    if (status && fold.open) for (const side of SIDES) side.look();
  });
}
range_s = Number($("range").querySelector("input:checked").value); // browsers restore it on a reload
const uPlot = await load();
$("charts-missing").hidden = uPlot !== null;
gains = new Charts(uPlot, $("gain"));
uses = new Charts(uPlot, $("charts"));
await turn();
