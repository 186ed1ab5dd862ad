"""The picture as a self-contained HTML page: the map, the findings, and a table of all workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from roost.placement.environment import worker_interpreter
from roost.placement.lint import lint
from roost.placement.placement import seat
from roost.placement.plan import ComponentPlan, Plan
from roost.redact import hide
from roost.render.grid import Grid
from roost.render.svg import STYLE, draw_rows, escape

_MOST_ROWS = 2000
"""The table of a component is cut after this many workers: a page of a million rows helps no reader."""

_WIDE, _NARROW = 8, 2
"""How many cells a line has on a wide screen, and on a telephone."""

_STYLE = (
    """
:root{color-scheme:light dark;--paper:#fff;--text:#1f2328;--soft:#59636e;--line:#d1d9e0;--tip:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--text:#f0f6fc;--soft:#9198a1;--line:#3d444d;--tip:#21262d}}
body{margin:0;padding:1.5rem 2rem 4rem;background:var(--paper);color:var(--text);font:14px/1.5 system-ui,sans-serif}
h1{font-size:1.25rem;margin:0;overflow-wrap:anywhere}h2{font-size:1rem;margin:2rem 0 .5rem}
p{margin:.25rem 0}.soft{color:var(--soft)}li,p{overflow-wrap:anywhere}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 2rem;padding:0;margin:1rem 0;list-style:none}
.legend li{cursor:default}.legend i{display:inline-block;width:14px;height:14px;border-radius:3px;margin-right:.5rem;
vertical-align:-2px}
input{font:inherit;color:inherit;background:var(--tip);border:1px solid var(--line);border-radius:6px;
padding:.3rem .6rem;width:min(24rem,100%);box-sizing:border-box}
.map{display:flex;flex-wrap:wrap;gap:.5rem 2.5rem;margin:1rem 0}svg{max-width:100%;height:auto}
.narrow{display:none}.block{cursor:help;outline:none}
.picked .block:not(.on),.picked .legend li:not(.on){opacity:.25}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.2rem .9rem .2rem 0;border-bottom:1px solid var(--line)}
th{font-weight:600}
td:not(:last-child),th{white-space:nowrap}td code{font-size:12px}summary{cursor:pointer;padding:.3rem 0;font-weight:600}
#tip{position:fixed;z-index:1;max-width:min(30rem,90vw);padding:.5rem .75rem;border:1px solid var(--line);
border-radius:6px;background:var(--tip);font:12px/1.5 ui-monospace,monospace;white-space:pre-wrap;
overflow-wrap:anywhere;pointer-events:none;box-shadow:0 4px 16px #0004;box-sizing:border-box}
@media(max-width:800px){body{padding:1rem 1rem 3rem}.wide{display:none}.map.narrow{display:flex}}
"""
    + STYLE
)

# The <title> elements of the SVG hold all details; the script shows them immediately, next to the pointer. Pointing at
# a block or at the legend picks out a component; the search picks out workers, and the rows of the tables.
_SCRIPT = """{
const tip=document.getElementById('tip'),find=document.getElementById('find'),found=document.getElementById('found');
const blocks=[...document.querySelectorAll('.block')],rows=[...document.querySelectorAll('tr[data-worker]')];
const words=new Map();
function pick(wanted){
  const any=wanted!==null;document.body.classList.toggle('picked',any);
  for(const item of document.querySelectorAll('[data-component]'))item.classList.toggle('on',any&&wanted(item));
}
const wanted=()=>find.value.trim().toLowerCase();
function pickFound(){
  const text=wanted();
  pick(text?item=>(words.get(item)||item.textContent).toLowerCase().includes(text):null);
}
function search(){
  pickFound();
  const text=wanted();
  let count=0;
  for(const row of rows){const hit=(row.dataset.worker+' '+row.textContent).toLowerCase().includes(text);
    row.hidden=!hit;count+=hit}
  for(const part of document.querySelectorAll('details'))
    part.open=text!==''&&!!part.querySelector('tr[data-worker]:not([hidden])');
  found.textContent=text?`${count} of ${rows.length} workers`:'';
}
find.addEventListener('input',search);
for(const block of blocks){
  const title=block.querySelector('title'),text=title.textContent;title.remove();block.setAttribute('aria-label',text);
  words.set(block,text);
  const show=(x,y)=>{tip.textContent=text;tip.hidden=false;
    tip.style.left=Math.max(8,Math.min(x+14,innerWidth-tip.offsetWidth-12))+'px';
    tip.style.top=Math.max(8,Math.min(y+14,innerHeight-tip.offsetHeight-12))+'px'};
  block.addEventListener('pointermove',e=>show(e.clientX,e.clientY));
  block.addEventListener('focus',()=>{const box=block.getBoundingClientRect();show(box.left,box.bottom)});
  for(const end of ['pointerleave','blur'])block.addEventListener(end,()=>{tip.hidden=true});
}
for(const item of document.querySelectorAll('[data-component]')){
  item.addEventListener('pointerenter',()=>pick(other=>other.dataset.component===item.dataset.component));
  item.addEventListener('pointerleave',pickFound);
}}
"""


def draw_html(plan: Plan, grid: Grid, below: Iterable[str] = ()) -> str:
    """Return the whole HTML page: the grid's picture, what belongs below it, then findings and workers of the plan."""
    heading = grid.title or "Placement map"
    shown = {entry.name for entry in grid.legend if entry.shown}
    findings = [
        f"<li><b>{item.level}</b> {escape(item.message)} [<code>{item.code}</code>]</li>" for item in lint(plan)
    ]
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)} - Roost</title>',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(heading)}</h1>",
        f'<p class="soft">{escape(grid.summary)}</p>',
        *([f"<p><strong>{escape(grid.mark)}</strong></p>"] if grid.mark else []),
        '<ul class="legend">',
        *(
            f'<li data-component="{index}"><i style="background:{entry.colour}"></i>'
            f'<strong>{escape(entry.name)}</strong> <span class="soft">{escape(entry.summary)}</span></li>'
            for index, entry in enumerate(grid.legend)
            if entry.shown
        ),
        "</ul>",
        '<p><input id="find" type="search" placeholder="Search workers, nodes, variables" aria-label="Search">',
        '<span id="found" class="soft" role="status"></span></p>',
        *('<div class="map wide">', *draw_rows(plan, grid, cells=_WIDE), "</div>"),
        *('<div class="map narrow">', *draw_rows(plan, grid, cells=_NARROW), "</div>"),
        *below,
        *(["<h2>Findings</h2><ul>", *findings, "</ul>"] if findings else []),
        "<h2>Workers</h2>",
        *(line for item in plan.components if item.name in shown for line in _table(plan, item)),
        f'<p class="soft">plan <code>{plan.hash}</code></p>',
        f'<div id="tip" role="tooltip" hidden></div><script>{_SCRIPT}</script></body></html>',
    ]
    return "\n".join(parts) + "\n"


def _table(plan: Plan, component: ComponentPlan) -> Iterator[str]:
    yield f"<details><summary>{escape(component.name)}: {component.world_size}</summary>"
    yield '<div class="scroll"><table>'
    yield "<tr><th>rank<th>seat<th>node group<th>local rank<th>environment</tr>"
    for placement in component.placements[:_MOST_ROWS]:
        variables = plan.environment(component.name, placement.rank)
        shown = " ".join(f"{name}={hide(name, value)}" for name, value in variables.items())
        interpreter = worker_interpreter(plan.topology, placement)
        if interpreter:
            shown += f" · {interpreter}"
        yield (
            f'<tr data-worker="{escape(component.name)}:{placement.rank}">'
            f"<td>{placement.rank}<td>{escape(seat(placement))}<td>{escape(placement.node_group_label)}"
            f"<td>{placement.local_rank} of {placement.local_world_size}<td><code>{escape(shown)}</code></tr>"
        )
    if component.world_size > _MOST_ROWS:
        yield f"<tr><td colspan=5>and {component.world_size - _MOST_ROWS} more; --format json has them all</tr>"
    yield "</table></div></details>"
