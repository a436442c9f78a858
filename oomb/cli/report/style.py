"""Define the style of the page: light or dark like the reader's system, one column on a phone."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fafaf8; --card: #ffffff; --ink: #1c1e21; --soft: #5b626b; --line: #dfe2e6; --grid: #eceef0;
  --c1: #0b6bb8; --c2: #c8500a; --c3: #15803d; --c4: #8b3fb0; --tint: 11, 107, 184;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --card: #1d2026; --ink: #e8eaed; --soft: #a2a9b3; --line: #343941; --grid: #2a2e35;
    --c1: #62b2f0; --c2: #f59e5b; --c3: #5fce8b; --c4: #cf97ee; --tint: 98, 178, 240;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1120px; padding: 24px 20px 48px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  -webkit-text-size-adjust: 100%;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 2px; }
p { margin: 0 0 12px; }
.soft, figcaption, .about { color: var(--soft); }
.about { font-size: 0.875rem; margin: 0 0 6px; }
.note { border-left: 4px solid var(--c2); padding: 6px 12px; background: var(--card); }
dl.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 20px 0 0; }
dl.figures div, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
dl.figures div { padding: 10px 14px; }
dt { color: var(--soft); font-size: 0.875rem; }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
dd small { font-weight: 400; font-size: 0.8rem; color: var(--soft); display: block; }
.grid-of-two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px; }
.grid-of-two > * { min-width: 0; }
.top { align-items: start; }
figure { margin: 0; padding: 14px 14px 8px; display: flex; flex-direction: column; }
figure svg { margin-top: auto; }
td small { display: block; color: var(--soft); }
.card { padding: 14px; }
.spaced { margin-bottom: 16px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 14px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.name { fill: var(--ink); }
.grid { stroke: var(--grid); stroke-width: 1; }
.axis, .tick { stroke: var(--soft); stroke-width: 1; }
.limit { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 6 4; }
.mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); }
path.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
path.dots { fill: none; stroke: none; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1; }
.hint { fill: transparent; }
.hint:hover { fill: var(--c); }
.error { stroke: var(--c); stroke-width: 2; opacity: 0.6; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 4px; padding: 0; }
ul.legend li { font-size: 0.875rem; }
ul.legend li::before {
  content: ""; display: inline-block; width: 14px; height: 4px; border-radius: 2px; background: var(--c);
  margin-right: 6px; vertical-align: middle;
}
ul.legend li.is-dots::before { width: 9px; height: 9px; border-radius: 50%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: 0.875rem; padding-bottom: 6px; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; }
th[scope="row"], th:first-child, .words td { text-align: left; }
.words td { white-space: normal; overflow-wrap: anywhere; }
.words th { font-weight: 400; color: var(--soft); vertical-align: top; }
td.heat { text-align: center; background: rgba(var(--tint), calc(var(--share) * 0.5)); }
td.bar { width: 40%; min-width: 100px; }
td.bar div { height: 10px; border-radius: 5px; background: var(--grid); overflow: hidden; }
td.bar div div { background: var(--c1); border-radius: 0; width: calc(var(--share) * 100%); }
pre {
  margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24em; overflow-y: auto;
  font: 0.85rem/1.45 ui-monospace, SFMono-Regular, Consolas, "DejaVu Sans Mono", monospace;
}
pre .prompt { color: var(--soft); }
details { margin-top: 16px; }
summary { cursor: pointer; }
footer { margin-top: 36px; color: var(--soft); font-size: 0.875rem; }
@media (max-width: 560px) {
  body { padding: 16px 12px 32px; }
  dl.figures { grid-template-columns: 1fr 1fr; gap: 8px; }
  dl.figures div { padding: 8px 10px; }
  th, td { padding: 4px 5px; white-space: normal; }
  td.bar { min-width: 56px; }
  details td { white-space: nowrap; }
}
@media print { body { max-width: none; } figure, .card { break-inside: avoid; } }
"""
