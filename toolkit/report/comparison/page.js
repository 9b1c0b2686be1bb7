"use strict";
(() => {
  // Theme: the system's, until somebody presses the button.
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => button.setAttribute("aria-pressed", String(dark()));
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  button.hidden = false;
  show();

  // Tables: headings become buttons. Numbers go largest first, texts from A to Z; again: the other way round.
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const sort = (table, heading) => {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const column = heading.cellIndex;
    const numeric = rows.some((row) => row.cells[column].dataset.value !== undefined);
    const falling = heading.ariaSort ? heading.ariaSort === "ascending" : numeric;
    const missing = (row) => numeric && row.cells[column].dataset.value === undefined;
    rows.sort((one, other) => {
      if (missing(one) || missing(other)) return missing(one) - missing(other);
      const [a, b] = [key(one, column), key(other, column)];
      const order = numeric ? a - b : a.localeCompare(b);
      return falling ? -order : order;
    });
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
    body.append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    for (const heading of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      button.addEventListener("click", () => sort(table, heading));
      heading.append(button);
    }
  }

  // On paper nothing can be opened.
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
