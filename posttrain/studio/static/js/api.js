// Requests to the server: JSON, the token for changes, and one event stream, which is closed while the tab is hidden.

let token = document.querySelector('meta[name="studio-token"]')?.getAttribute("content") ?? "";

/** @param {string} path @param {Record<string, any>} [query] @returns {Promise<any>} */
export async function get(path, query = {}) {
  return answer(await fetch(address(path, query)));
}

/** @param {string} path @param {any} body @returns {Promise<any>} */
export async function post(path, body = {}) {
  const send = () => fetch(path, { method: "POST", headers: { "content-type": "application/json", "x-studio-token": token }, body: JSON.stringify(body) });
  let response = await send();
  if (response.status === 401) {
    // the server was restarted, and has another token
    token = /name="studio-token" content="(\w+)"/.exec(await (await fetch("/")).text())?.[1] ?? token;
    response = await send();
  }
  return answer(response);
}

/** @param {string} path @param {Record<string, any>} query */
export function address(path, query) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) words.append(name, String(one));
    }
  }
  const text = words.toString();
  return text ? `${path}?${text}` : path;
}

/** @param {Response} response */
async function answer(response) {
  const text = await response.text();
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    found = { error: text || `the server answered ${response.status}` };
  }
  if (!response.ok) throw new Error(found.error ?? `the server answered ${response.status}`);
  return found;
}

/**
 * Call `changed` when the run (or any run) has changed. Returns a function that ends this.
 * @param {string} run
 * @param {() => void} changed
 */
export function follow(run, changed) {
  /** @type {EventSource|null} */
  let source = null;
  let due = 0;
  const open = () => {
    source = new EventSource(address("/api/events", { run }));
    source.addEventListener("changed", () => {
      clearTimeout(due);
      due = window.setTimeout(changed, 100);
    });
  };
  const seen = () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source) {
      open();
      changed();
    }
  };
  open();
  document.addEventListener("visibilitychange", seen);
  return () => {
    clearTimeout(due);
    document.removeEventListener("visibilitychange", seen);
    source?.close();
  };
}
