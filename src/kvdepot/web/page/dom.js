// Changes the document as little as possible, so that focus, selections and screen readers keep their place.

export const $ = (id) => document.getElementById(id);

/** A new element: make("td", { class: "num" }, "12"). */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Like `say`, with what is between backticks as code. */
export function sayProse(element, text) {
  const plain = text.replaceAll("`", "");
  if (element.textContent === plain) return;
  element.replaceChildren(...text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part)));
}

export function set(element, name, value) {
  const text = String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/**
 * Give `parent` one child per item, in order. key(item) identifies an item (it may repeat); make(item) creates a child;
 * fill(child, item) updates it.
 */
export function list(parent, items, key, make, fill) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const seen = new Map(); // number of items by key
  let at = parent.firstElementChild;
  for (const item of items) {
    const times = (seen.get(key(item)) ?? 0) + 1;
    seen.set(key(item), times);
    const name = `${times} ${key(item)}`;
    let child = old.get(name);
    old.delete(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    fill(child, item);
  }
  for (const child of old.values()) child.remove();
}

/** Fill a list of names and values. */
export function fillFacts(part, facts) {
  list(
    part,
    facts,
    ([name]) => name,
    ([name]) => make("div", {}, make("dt", {}, name), make("dd")),
    (item, [, value, title]) => {
      say(item.lastElementChild, value);
      if (title) set(item.lastElementChild, "title", title);
    },
  );
}

/**
 * Rows of a table: columns are [class, text of an item, title of an item, fill(cell, item)]; the first one is the row's
 * header. With `fill`, the cell has elements of its own, and `text` is not used.
 */
export function rows(table, items, key, columns, body = table.tBodies[0]) {
  const none = document.getElementById(`${table.id}-none`);
  if (none) none.hidden = items.length > 0;
  const region = table.closest(".scroll");
  if (region && none) region.hidden = items.length === 0;
  list(
    body,
    items,
    key,
    () =>
      make(
        "tr",
        {},
        ...columns.map(([kind], i) => make(i ? "td" : "th", { class: kind, ...(i ? {} : { scope: "row" }) })),
      ),
    (row, item) => {
      columns.forEach(([, text, title, fill], i) => {
        if (fill) fill(row.cells[i], item);
        else say(row.cells[i], text(item));
        if (title) set(row.cells[i], "title", title(item));
      });
    },
  );
}

/** The only child of an element, made once: child(cell, () => make("a")). */
export function child(parent, create) {
  if (!parent.firstElementChild) parent.append(create());
  return parent.firstElementChild;
}

/** Fill a bar to `part` (0 to 1), also for screen readers. */
export function bar(element, part, text) {
  const percent = Math.min(Math.max(100 * (part || 0), 0), 100);
  set(element, "aria-valuenow", percent.toFixed(1));
  set(element, "aria-valuetext", text);
  element.querySelector(".fill").style.inlineSize = `${percent}%`;
}
