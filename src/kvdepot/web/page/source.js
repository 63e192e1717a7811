// Asking the server. Its token comes in the address's fragment (`kvdepot open`), which browsers send to nobody.

/** More than the server waits for something new. */
const TIMEOUT_MS = 6000;

let token = take();

function take() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  try {
    if (given) {
      sessionStorage.setItem("token", given);
      history.replaceState(null, "", location.pathname + location.search); // not to stay in the address bar
    }
    return given ?? sessionStorage.getItem("token");
  } catch {
    return given; // storage is forbidden here: it lasts until the page is loaded again
  }
}

/** Whether there is a token to send. */
export const hasToken = () => Boolean(token);

export function useToken(given) {
  token = given;
  try {
    sessionStorage.setItem("token", given);
  } catch {
    // as above
  }
}

/** The server answered that it will not, or cannot. status: of HTTP. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** What the server answers, as plain data. Throws Refusal, or what fetch throws when nobody answers, or after stop.abort(). */
export async function ask(path, stop) {
  const timer = setTimeout(() => stop.abort(), TIMEOUT_MS);
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch(path, { cache: "no-store", headers, signal: stop.signal });
    if (answer.ok) return await answer.json();
    let message = `HTTP ${answer.status}`;
    try {
      message = String((await answer.json()).message || message);
    } catch {
      // not one of our answers: a proxy's
    }
    throw new Refusal(answer.status, message);
  } finally {
    clearTimeout(timer);
  }
}
