"""The picture as a self-contained HTML page: the map, the findings, and a table of all workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from roost.placement.environment import worker_interpreter
from roost.placement.lint import lint
from roost.placement.placement import seat
from roost.placement.plan import ComponentPlan, Plan
from roost.redact import hide
from roost.render.grid import Grid
from roost.render.svg import draw_svg, escape

_MOST_ROWS = 2000
"""The table of a component is cut after this many workers: a page of a million rows helps no reader."""

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--text:#1f2328;--soft:#59636e;--line:#d1d9e0;--tip:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--text:#f0f6fc;--soft:#9198a1;--line:#3d444d;--tip:#21262d}}
body{margin:0;padding:1.5rem 2rem 4rem;background:var(--paper);color:var(--text);font:14px/1.5 system-ui,sans-serif}
h1{font-size:1.25rem;margin:0}h2{font-size:1rem;margin:2rem 0 .5rem}.soft{color:var(--soft)}
.map{overflow-x:auto;margin:0 -24px}.block{cursor:help;outline:none}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.2rem .9rem .2rem 0;border-bottom:1px solid var(--line)}
th{font-weight:600}
td:not(:last-child),th{white-space:nowrap}td code{font-size:12px}summary{cursor:pointer;padding:.3rem 0;font-weight:600}
#tip{position:fixed;z-index:1;max-width:30rem;padding:.5rem .75rem;border:1px solid var(--line);border-radius:6px;
background:var(--tip);font:12px/1.5 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;
pointer-events:none;box-shadow:0 4px 16px #0004}
"""

# The <title> elements of the SVG hold all details; the script shows them immediately, next to the pointer.
_SCRIPT = """
const tip=document.getElementById('tip');
for(const block of document.querySelectorAll('.block')){
  const title=block.querySelector('title'),text=title.textContent;title.remove();block.setAttribute('aria-label',text);
  const show=(x,y)=>{tip.textContent=text;tip.hidden=false;
    tip.style.left=Math.max(8,Math.min(x+14,innerWidth-tip.offsetWidth-12))+'px';
    tip.style.top=Math.max(8,Math.min(y+14,innerHeight-tip.offsetHeight-12))+'px'};
  block.addEventListener('pointermove',e=>show(e.clientX,e.clientY));
  block.addEventListener('focus',()=>{const box=block.getBoundingClientRect();show(box.left,box.bottom)});
  for(const end of ['pointerleave','blur'])block.addEventListener(end,()=>{tip.hidden=true});
}
"""


def draw_html(plan: Plan, grid: Grid, below: Iterable[str] = ()) -> str:
    """Return the whole HTML page: the grid's picture, what belongs below it, then findings and workers of the plan."""
    heading = grid.title or "Placement map"
    shown = {entry.name for entry in grid.legend if entry.shown}
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)} - Roost</title>',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(heading)}</h1>",
        f'<div class="map">{draw_svg(plan, replace(grid, title=""))}</div>',
        *below,
        *_findings(plan),
        "<h2>Workers</h2>",
        *(line for item in plan.components if item.name in shown for line in _table(plan, item)),
        f'<p class="soft">plan <code>{plan.hash}</code></p>',
        f'<div id="tip" role="tooltip" hidden></div><script>{_SCRIPT}</script></body></html>',
    ]
    return "\n".join(parts) + "\n"


def _findings(plan: Plan) -> Iterator[str]:
    found = lint(plan)
    if found:
        yield "<h2>Findings</h2><ul>"
        for item in found:
            yield f"<li><b>{item.level}</b> {escape(item.message)} [<code>{item.code}</code>]</li>"
        yield "</ul>"


def _table(plan: Plan, component: ComponentPlan) -> Iterator[str]:
    yield f"<details><summary>{escape(component.name)}: {component.world_size}</summary><table>"
    yield "<tr><th>rank<th>seat<th>node group<th>local rank<th>environment</tr>"
    for placement in component.placements[:_MOST_ROWS]:
        variables = plan.environment(component.name, placement.rank)
        shown = " ".join(f"{name}={hide(name, value)}" for name, value in variables.items())
        interpreter = worker_interpreter(plan.topology, placement)
        if interpreter:
            shown += f" · {interpreter}"
        yield (
            f"<tr><td>{placement.rank}<td>{escape(seat(placement))}<td>{escape(placement.node_group_label)}"
            f"<td>{placement.local_rank} of {placement.local_world_size}<td><code>{escape(shown)}</code></tr>"
        )
    if component.world_size > _MOST_ROWS:
        yield f"<tr><td colspan=5>and {component.world_size - _MOST_ROWS} more; --format json has them all</tr>"
    yield "</table></details>"
