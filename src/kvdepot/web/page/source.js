// Asking the server. Its token comes in the address's fragment (`kvdepot open`), which browsers send to nobody.

const TIMEOUT_MS = 5000;

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

/** What the server answers, as plain data. Throws Refusal, or what fetch throws when nobody answers. */
export async function ask(path) {
  const answer = await fetch(path, {
    cache: "no-store",
    headers: token ? { Authorization: `Bearer ${token}` } : {},
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (answer.ok) return answer.json();
  let message = `HTTP ${answer.status}`;
  try {
    message = String((await answer.json()).message || message);
  } catch {
    // not one of our answers: a proxy's
  }
  throw new Refusal(answer.status, message);
}
