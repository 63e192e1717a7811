// What an operator can do: load, lease, end a lease, forget. Each in one dialogue, which says beforehand what will happen.

import { $, make, say } from "./dom.js";
import { bytes, count } from "./format.js";
import { Refusal, hasToken, send, useToken } from "./source.js";

const LIKE_A_HASH = /^[0-9a-f]{64}$/i;
const ALL = "";
/** Delay after the last key before a preview is requested. */
const PAUSE_MS = 300;
const PREVIEW = "Show what would be removed";

/** An entry that the server would refuse, as a sentence. */
class Wrong extends Error {}

/** Token ids, or chunk hashes in hex, as the fields of a request. Throws Wrong. */
export function promptOf(text) {
  const words = text.split(/[\s,[\]"]+/).filter(Boolean);
  if (!words.length) throw new Wrong("Give the prompt.");
  if (words.every((word) => LIKE_A_HASH.test(word))) return { hashes: words.map((word) => word.toLowerCase()) };
  if (words.every((word) => /^\d{1,10}$/.test(word))) return { tokens: words.map(Number) };
  throw new Wrong("The prompt is neither a list of token ids nor one of chunk hashes (64 hex digits each).");
}

const FIELDS = {
  name: () => ["Name", make("input", { required: "", maxlength: 256, autocomplete: "off" })],
  model: (status) => ["Model", modelsOf(status)],
  models: (status) => ["Model", modelsOf(status, make("option", { value: ALL }, "All models"))],
  prompt: () => ["Prompt: token ids, or chunk hashes", make("textarea", { required: "", rows: 4, spellcheck: "false" })],
  salt: () => ["Cache salt, if the requests have one", make("input", { autocomplete: "off" })],
  ttl: () => [
    "Until",
    make(
      "select",
      {},
      ...[["it is ended", 0], ["10 minutes from now", 600], ["an hour from now", 3600], ["a day from now", 86_400]].map(
        ([text, value]) => make("option", { value }, text),
      ),
    ),
  ],
};

function modelsOf(status, ...first) {
  const names = [...new Set(status.namespaces.map((space) => space.model))];
  return make("select", {}, ...first, ...names.map((name) => make("option", { value: name }, name)));
}

const chunksOf = (answer) => `${count(answer.chunks)} of ${count(answer.of_chunks)} chunks`;
const promptBody = (given) => ({ model: given.model, salt: given.salt, ...promptOf(given.prompt) });

/**
 * title, what: of the dialogue. verb: of its button. fields: names in FIELDS. path, body: the request. done: what to say
 * afterwards. preview: says what would happen, and is needed before it can.
 */
const ACTIONS = {
  warm: {
    title: () => "Load a prompt into memory",
    what: "Its chunks are loaded from the tiers, as far as those have them. Other chunks are evicted to make room. Nothing keeps them afterwards: to keep them, lease the prompt.",
    verb: "Load",
    fields: ["model", "prompt", "salt"],
    path: "v1/warm",
    body: promptBody,
    done: (answer) => `${chunksOf(answer)} are in memory.`,
  },
  lease: {
    title: () => "Lease a prompt",
    what: "Its chunks are loaded from the tiers and not evicted until the lease ends. A lease of the same name is replaced. Leases can hold half of the memory at most.",
    verb: "Lease",
    fields: ["name", "model", "prompt", "salt", "ttl"],
    path: "v1/lease",
    body: (given) => ({ name: given.name, ttl_s: Number(given.ttl), ...promptBody(given) }),
    done: (answer) => `${chunksOf(answer)} are leased.`,
  },
  release: {
    title: (of) => `End the lease ${of}`,
    what: "Its chunks stay in memory until their turn to be evicted. The client that started the lease is not notified.",
    verb: "End the lease",
    fields: [],
    path: "v1/release",
    body: (_, of) => ({ name: of, drops: false }),
    done: () => "The lease has ended.",
  },
  forget: {
    title: () => "Forget chunks",
    what: "They are removed permanently from memory and from every tier. Depots that share a tier lose them, too. Engines keep running, and recompute what they need.",
    verb: "Forget",
    isHarmful: true,
    fields: ["models", "salt"],
    path: "v1/forget",
    body: (given) => (given.models || given.salt ? { model: given.models, salt: given.salt } : { all: true }),
    preview: "v1/forget/preview",
    done: (answer) => `Removed: ${Object.entries(answer).map(([place, chunks]) => `${place}: ${count(chunks)} chunks`).join("; ")}.`,
  },
};

const dialog = $("action");
let current = null; // { action, of, inputs }
let asked = 0; // the number of the latest preview
let timer = 0;

/** Open the dialogue of an action. of: what the row is about, if it was chosen in a table. */
export function open(name, of, status) {
  const action = ACTIONS[name];
  const inputs = {};
  const fields = action.fields.map((field) => {
    const [label, input] = FIELDS[field](status);
    inputs[field] = input;
    return make("label", {}, make("span", {}, label), input);
  });
  if (of && inputs.models) inputs.models.value = of;
  inputs.token = make("input", { type: "password", autocomplete: "off", "aria-describedby": "token-help" });
  const help = make("small", { id: "token-help", class: "soft" }, "Asked once; kept until this tab is closed. ", make("code", {}, "kvdepot status --http"), " prints it.");
  const token = make("div", { id: "action-token" }, make("label", {}, make("span", {}, "Token"), inputs.token), help);
  $("action-fields").replaceChildren(...fields, token);
  current = { action, of, inputs };
  askToken(!hasToken());
  say($("action-title"), action.title(of));
  say($("action-what"), action.what);
  $("action-effect").replaceChildren();
  say($("action-error"), "");
  say($("action-close"), "Cancel");
  $("action-do").hidden = false;
  offer(action.preview && !hasToken() ? PREVIEW : action.verb);
  $("action-do").classList.toggle("harmful", Boolean(action.isHarmful));
  dialog.showModal();
  if (hasToken()) preview();
}

/** Let the button do what it says; nothing: it can do nothing now. */
function offer(verb) {
  if (verb) say($("action-do"), verb);
  $("action-do").disabled = !verb;
}

function askToken(isAsked) {
  $("action-token").hidden = !isAsked;
  current.inputs.token.required = isAsked;
}

/** What was entered. */
const given = () => Object.fromEntries(Object.entries(current.inputs).map(([name, input]) => [name, input.value.trim()]));

/** POST with the token, asking for it if the server wants another one. Throws like `send`. */
async function change(path, body) {
  const typed = current.inputs.token.value.trim();
  if (!$("action-token").hidden && typed) useToken(typed);
  try {
    const answer = await send(path, body);
    askToken(false);
    return answer;
  } catch (problem) {
    if (problem instanceof Refusal && problem.status === 401) {
      askToken(true);
      current.inputs.token.value = "";
      current.inputs.token.focus();
      throw new Wrong(typed ? "Wrong token." : "This requires the token.");
    }
    throw problem;
  }
}

const sentence = (text) => (text ? `${text[0].toUpperCase()}${text.slice(1)}${/[.?!]$/.test(text) ? "" : "."}` : "");

/** Show what the action would do; only then can it be done. */
async function preview() {
  const { action, of } = current;
  if (!action.preview) return;
  const mine = ++asked;
  offer("");
  say($("action-error"), "");
  try {
    const seen = await change(action.preview, action.body(given(), of));
    if (mine !== asked || !dialog.open) return;
    const tiers = Object.entries(seen.tiers).map(([place, tier]) => {
      const known = [tier.objects_at_most !== null && `${count(tier.objects_at_most)} objects`, tier.bytes_at_most !== null && bytes(tier.bytes_at_most)];
      return [place, known.some(Boolean) ? `at most ${known.filter(Boolean).join(", ")}` : "unknown (not reported by the tier)"];
    });
    const places = [["Memory", `${count(seen.memory.chunks)} chunks, ${bytes(seen.memory.bytes)}`], ...tiers];
    $("action-effect").replaceChildren(
      make("p", {}, "This would remove:"),
      make("dl", {}, ...places.map(([place, what]) => make("div", {}, make("dt", { class: "ellipsis", title: place }, place), make("dd", {}, what)))),
    );
    offer(`${action.verb} ${seen.memory.chunks === 1 ? "1 chunk" : `${count(seen.memory.chunks)} chunks`}`);
  } catch (problem) {
    if (mine !== asked || !dialog.open) return;
    $("action-effect").replaceChildren();
    say($("action-error"), sentence(problem.message));
    offer(PREVIEW);
  }
}

async function perform() {
  const { action, of } = current;
  if (action.preview && !$("action-effect").children.length) return preview(); // Enter after the token
  const wasOpen = current;
  say($("action-error"), "");
  offer("");
  try {
    const answer = await change(action.path, action.body(given(), of));
    if (wasOpen !== current || !dialog.open) return;
    $("action-effect").replaceChildren(make("p", {}, action.done(answer)));
    $("action-fields").replaceChildren();
    $("action-do").hidden = true;
    say($("action-close"), "Close");
    $("action-close").focus();
  } catch (problem) {
    if (wasOpen !== current || !dialog.open) return;
    say($("action-error"), sentence(problem.message));
    offer(action.verb);
  }
}

$("action-form").addEventListener("submit", (event) => {
  event.preventDefault();
  perform();
});
$("action-form").addEventListener("input", (event) => {
  clearTimeout(timer);
  if (!current.action.preview || event.target === current.inputs.token) return;
  asked += 1; // one that is on its way is of no use
  $("action-effect").replaceChildren();
  if (hasToken()) {
    offer("");
    timer = setTimeout(preview, PAUSE_MS);
  } else offer(PREVIEW);
});
$("action-close").addEventListener("click", () => dialog.close());
