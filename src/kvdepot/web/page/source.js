// Requests to the server. The token comes in the URL's fragment (`kvdepot status --http`), which browsers do not send.

/** Longer than the server needs to notice that the depot does not answer. */
const TIMEOUT_MS = 8000;
/** Loading a prompt from slow tiers takes minutes. */
const CHANGE_TIMEOUT_MS = 180_000;

let token = take();

function take() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  try {
    if (given) {
      sessionStorage.setItem("token", given);
      history.replaceState(null, "", location.pathname + location.search); // remove it from the address bar
    }
    return given ?? sessionStorage.getItem("token");
  } catch {
    return given; // storage is forbidden here, so it lasts until the page is reloaded
  }
}

/** Whether there is a token to send. */
export const hasToken = () => Boolean(token);

export function useToken(given) {
  token = given;
  try {
    sessionStorage.setItem("token", given);
  } catch {
    // storage is forbidden
  }
}

/** The server returned an error. status: of HTTP. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The server's response as plain data. Throws Refusal, or what fetch throws without a response or after stop.abort(). */
export const ask = (path, stop = new AbortController()) =>
  within(TIMEOUT_MS, stop, async () => (await request(path, {}, stop)).json());

/** Change something: POST `body`. Throws like `ask`. */
export const send = (path, body) => {
  const stop = new AbortController();
  return within(CHANGE_TIMEOUT_MS, stop, async () => (await request(path, { method: "POST", body: JSON.stringify(body) }, stop)).json());
};

/** Wait for `task`, and abort it after a time. */
async function within(timeout_ms, stop, task) {
  const timer = setTimeout(() => stop.abort(), timeout_ms);
  try {
    return await task();
  } finally {
    clearTimeout(timer);
  }
}

async function request(path, options, stop) {
  const headers = { ...(token && { Authorization: `Bearer ${token}` }), ...(options.body && { "Content-Type": "application/json" }) };
  const answer = await fetch(path, { ...options, cache: "no-store", headers, signal: stop.signal });
  if (answer.ok) return answer;
  let message = `HTTP ${answer.status}`;
  try {
    message = String((await answer.json()).message || message);
  } catch {
    // not our response, but a proxy's
  }
  throw new Refusal(answer.status, message);
}
