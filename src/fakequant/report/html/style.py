"""The style sheet and the script of a page; the page reads without the script, which sorts and filters layers."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --line: #d0d7de; --zebra: #f6f8fa;
  --good: #1a7f37; --fair: #9a6700; --bad: #c0341d; --bar: #0072b2; --mark: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --paper: #0d1117; --line: #30363d;
  --zebra: #161b22; --good: #56d364; --fair: #e3b341; --bad: #ff7b72; --bar: #58a6ff; --mark: #f0883e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { line-height: 1.2; margin: 0 0 .25rem; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .5rem; font-size: 1.25rem; border-bottom: 1px solid var(--line); }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; overflow-wrap: anywhere; }
p { max-width: 46rem; margin: .4rem 0; } code { font-size: .9em; } ul { max-width: 46rem; }
.soft { color: var(--soft); } .good { color: var(--good); } .fair { color: var(--fair); } .bad { color: var(--bad); }
nav { font-size: .9rem; margin-top: 1rem; } nav a { margin-right: 1rem; display: inline-block; } a { color: inherit; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; border-left: 4px solid var(--line); }
.tile.good { border-left-color: var(--good); } .tile.bad { border-left-color: var(--bad); }
.tile.fair { border-left-color: var(--fair); } .tile > * { color: var(--ink); margin: 0; overflow-wrap: anywhere; }
.tile .what { font-size: .8rem; color: var(--soft); } .tile b { display: block; font-size: 1.35rem; line-height: 1.3; }
.tile.good b { color: var(--good); } .tile.bad b { color: var(--bad); } .tile.fair b { color: var(--fair); }
.tile b code { font-size: 1rem; } .tile p { font-size: .85rem; }
pre { background: var(--zebra); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; overflow-x:
  auto;
  font-size: .85rem; margin: .5rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  font-weight: normal; }
thead th { font-weight: 600; vertical-align: bottom; } tbody tr:nth-child(even) { background: var(--zebra); }
td.number { white-space: nowrap; } .number, .layers tr :nth-child(n+4) { text-align: right; }
.layers { width: 100%; table-layout: fixed; } .layers th:first-child { width: 22%; } .layers th,
.layers td { padding-right: .5rem; }
.layers th:nth-child(2) { width: 11%; } .layers th:nth-child(3) { width: 26%; }
.layers th:first-child, .layers td { overflow-wrap: anywhere; }
.layers td:nth-child(3) { font-size: .8rem; color: var(--soft); }
.layers i { display: block; height: 4px; background: currentColor; margin-left: auto; border-radius: 2px; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; text-align: inherit; cursor:
  pointer;
  text-decoration: underline dotted; } th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.tools { display: flex; flex-wrap: wrap; gap: .5rem; margin: .5rem 0; } .tools input { flex: 1 1 12rem; max-width:
  24rem; }
.tools * { font: inherit; padding: .25rem .5rem; color: inherit; background: var(--paper);
  border: 1px solid var(--line); border-radius: 6px; } [hidden] { display: none !important; }
details { border-bottom: 1px solid var(--line); }
summary { cursor: pointer; padding: .3rem 0; overflow-wrap: anywhere; }
.heat { display: inline-flex; gap: 2px; vertical-align: middle; margin-left: .5rem; }
.heat i { width: 12px; height: 12px; border-radius: 2px; background: currentColor; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr)); gap: 1rem 1.5rem;
  margin: .75rem 0; }
figure { margin: 0; break-inside: avoid; min-width: 0; } figcaption { font-size: .85rem; overflow-wrap: anywhere; }
figure p { font-size: .8rem; margin: .1rem 0; } svg { display: block; width: 100%; height: auto; overflow: visible; }
.axis { display: flex; justify-content: space-between; font-size: .75rem; color: var(--soft); }
.curve { max-width: 40rem; } .curve text { font-size: 11px; fill: currentColor; }
.key { display: inline-block; width: 22px; height: 4px; vertical-align: middle; margin-right: .3em; }
@media print, (max-width: 900px) { .layers { font-size: .75rem; } .layers th,
  .layers td { padding-right: .3rem; } .layers th:nth-child(2) { width: 13%; }
  .layers th:nth-child(3) { width: 22%; } }
@media (max-width: 640px) { .wide th, .wide td { padding-right: .5rem; font-size: .8rem; }
  body { padding: 1rem .8rem 3rem; } .layers thead { display: none; }
  .layers, .layers tbody, .layers tr, .layers th, .layers td { display: block; width: auto !important; border: 0;
  text-align: left !important; padding: 0; }
  .layers tr { display: flex; flex-wrap: wrap; gap: 0 .8rem; border-bottom: 1px solid var(--line);
  padding: .35rem .2rem; }
  .layers tr th:first-child, .layers td:nth-child(3) { flex: 1 0 100%; } .layers td:empty { display: none; }
  .layers td { font-size: .8rem; } .layers td:nth-child(4) { font-weight: 600; } .layers i { display: none; }
  .layers td:nth-child(n+4)::before { color: var(--soft); font-weight: normal; }
  .single td:nth-child(4)::before { content: "alone "; } .single td:nth-child(5)::before { content: "input "; }
  .single td:nth-child(6)::before { content: "weight "; } .single td:nth-child(7)::before { content: "bits "; }
  .single td:nth-child(8)::before { content: "share "; } .pair td:nth-child(4)::before { content: "A "; }
  .pair td:nth-child(5)::before { content: "B "; } .pair td:nth-child(6)::before { content: "B less A "; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff; --line: #bbb; --zebra: #fff;
  --good: #116329; --fair: #7a5200; --bad: #b42318; --bar: #0072b2; --mark: #d55e00; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav, .tools { display: none; }
  .tiles { grid-template-columns: 1fr 1fr; } h2, h3, summary { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
  tr, .tile, figure { break-inside: avoid; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  .wide { overflow: visible; } }
"""

SCRIPT = """
(() => {
  const home = document.getElementById("rows");
  if (!home) return;
  const blocks = [...home.children], flat = document.createElement("div");
  const rows = [...home.querySelectorAll("tbody tr")], places = rows.map(row => row.parentNode);
  const value = cell => { const text = cell.textContent.trim();
    return text === "exact" ? Infinity : text === "" ? NaN : parseFloat(text.replace(/,/g, "")); };
  const head = home.querySelector("table").cloneNode(true);
  head.tBodies[0].replaceChildren();
  flat.append(head); flat.hidden = true; home.after(flat);
  const tools = document.createElement("div"), search = document.createElement("input");
  const back = document.createElement("button");
  tools.className = "tools"; search.type = "search"; search.placeholder = "filter by name, type or format";
  search.setAttribute("aria-label", "filter layers"); back.textContent = "network order"; back.type = "button";
  back.hidden = true; tools.append(search, back); home.before(tools);
  const sort = (column, down) => {
    const key = row => column < 3 ? row.cells[column].textContent : value(row.cells[column]);
    const order = (a, b) => { const x = key(a), y = key(b);
      if (typeof x === "string") return (down ? -1 : 1) * x.localeCompare(y, "en", {numeric: true});
      return isNaN(x) ? 1 : isNaN(y) ? -1 : x === y ? 0 : (x < y ? -1 : 1) * (down ? -1 : 1); };
    head.tBodies[0].append(...[...rows].sort(order));
    flat.hidden = back.hidden = false; home.hidden = true;
    document.querySelectorAll(".layers.sortable thead th").forEach(th => th.removeAttribute("aria-sort"));
    head.tHead.rows[0].cells[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  };
  const button = (th, column) => { const b = document.createElement("button"); b.type = "button";
    b.append(...th.childNodes); th.append(b);
    b.onclick = () => sort(column, th.getAttribute("aria-sort") === "ascending"); };
  [...home.querySelectorAll("table"), head].forEach(table => { table.classList.add("sortable");
    [...table.tHead.rows[0].cells].forEach(button); });
  back.onclick = () => { rows.forEach((row, at) => places[at].append(row)); flat.hidden = back.hidden = true;
    home.hidden = false; };
  search.oninput = () => { const words = search.value.toLowerCase();
    rows.forEach(row => { row.hidden = !row.textContent.toLowerCase().includes(words); });
    blocks.forEach(block => { const found = block.querySelector("tbody tr:not([hidden])");
      block.hidden = !found; if (words && found && block.tagName === "DETAILS") block.open = true; }); };
})();
"""
