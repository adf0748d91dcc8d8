"use strict";
// The only script: hides rows of the main table that the three choices leave out. Without it every row is shown.
const form = document.getElementById("filter");
if (form) {
  const told = form.querySelector("output");
  const rows = [...document.querySelectorAll(":is(#results, #small) tr[data-policy]")];
  const filter = () => {
    const wanted = Object.fromEntries(new FormData(form));
    const fits = (element, names) => names.every((name) => !wanted[name] || element.dataset[name] === wanted[name]);
    let shown = 0;
    for (const body of document.querySelectorAll(":is(#results, #small) tbody")) {
      const inside = fits(body, ["engine", "model"]);
      let left = 0;
      for (const row of body.querySelectorAll("tr[data-policy]")) {
        row.hidden = !(inside && fits(row, ["policy"]));
        if (!row.hidden && !row.classList.contains("drawer")) left += 1;
      }
      body.hidden = left === 0;
      shown += left;
    }
    const all = rows.filter((row) => !row.classList.contains("drawer")).length;
    told.textContent = `${shown} of ${all} rows`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("reset", () => setTimeout(filter));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
}
// A link to a provenance drawer or to a list of files opens it.
const open = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) target.open = true;
};
addEventListener("hashchange", open);
open();
