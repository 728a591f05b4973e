"use strict";
(() => {
  const table = document.getElementById("table");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const buttons = [...table.querySelectorAll("thead button")];
  const order = document.getElementById("sort");
  const find = document.getElementById("search");
  const filters = ["op", "device", "source"].map((name) => [name, document.getElementById("filter-" + name)]);
  const words = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const names = new Intl.Collator("en", { numeric: true });
  const listed = new Map(rows.map((row, place) => [row, place]));

  // Down first for the gain and the share, whose largest are looked for; what has no value stands last either way.
  const sort = (key, direction) => {
    const button = buttons.find((b) => b.dataset.key === key);
    const compare = (a, b) => {
      const [x, y] = [a.dataset[key], b.dataset[key]];
      if (x === "" || y === "") return (x === "") - (y === "");
      return direction * (button.dataset.type === "number" ? x - y : names.compare(x, y));
    };
    if (button) rows.sort((a, b) => compare(a, b) || listed.get(a) - listed.get(b));
    else rows.sort((a, b) => listed.get(a) - listed.get(b));
    body.append(...rows);
    for (const b of buttons) {
      const mine = b === button;
      b.closest("th").setAttribute("aria-sort", mine ? (direction > 0 ? "ascending" : "descending") : "none");
    }
    order.value = [...order.options].some((o) => o.value === key) ? key : "";
  };
  const first = (key) => (key === "gain" || key === "share" || key === "date" ? -1 : 1);
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const key = button.dataset.key;
      const now = button.closest("th").getAttribute("aria-sort");
      sort(key, now === "none" ? first(key) : now === "ascending" ? -1 : 1);
    });
  }
  order.addEventListener("change", () => sort(order.value, first(order.value)));

  const filter = () => {
    const wanted = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row, only) =>
      filters.every(([name, select]) => !select.value || !only.includes(name) || row.dataset[name] === select.value);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !(fits(row, ["op", "device", "source"]) && wanted.every((word) => words.get(row).includes(word)));
      shown += !row.hidden;
    }
    for (const part of document.querySelectorAll(".group")) part.hidden = !fits(part, ["op", "device"]);
    for (const part of document.querySelectorAll("figure, .places tbody tr")) part.hidden = !fits(part, ["device"]);
    document.getElementById("count").value = shown + " of " + rows.length;
    document.getElementById("none").hidden = shown > 0;
    table.parentElement.hidden = shown === 0;
  };
  for (const [, select] of filters) select.addEventListener("change", filter);
  find.addEventListener("input", filter);
  document.querySelector(".filters").hidden = false;
  filter(); // a page that is loaded again keeps what was chosen
})();
