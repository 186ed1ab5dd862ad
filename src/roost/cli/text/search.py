"""The answer of a search as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from roost.cli.text.layout import aligned
from roost.render.bars import Bar, draw_bars
from roost.render.grid import PALETTE
from roost.search.answer import Answer, Option
from roost.search.problem import seconds
from roost.search.sensitivity import Doubt
from roost.search.setup import Setup
from roost.search.simulate import Simulated
from roost.text import at_most, join_words, plural

_MOST_DOUBTS = 6


def bars_of(option: Option) -> list[Bar]:
    """Return what each role does in a step, in the colours of the map."""
    return [
        Bar(
            name=name,
            colour=PALETTE[index % len(PALETTE)],
            parts=(min(1.0, share.busy), share.switching, share.idle),
            note=plural(share.devices, "device"),
        )
        for index, (name, share) in enumerate(option.shares().items())
    ]


def answer_text(answer: Answer, simulated: Sequence[Simulated], width: int) -> Text:
    """Explain the best placement, and list the others."""
    best = answer.best
    lines = [Text.assemble((f"{seconds(best.step_time):.4g} s a step", "bold"), ", and no legal placement is quicker")]
    lines.append(Text(f"{best.critical_cycle} sets the pace"))
    lines += [Text(idle)] if (idle := _idle(best)) else []
    lines += [Text(""), draw_bars(bars_of(best), width=width), Text("")]
    lines.append(Text("component_placement:", style="bold"))
    lines += [Text(f"  {name}: {ranks}") for name, ranks in best.component_placement.items()]
    lines += [Text(""), *_interpolated(best)]
    if answer.others:
        lines.append(Text("alternatives", style="bold"))
        for other in answer.others:
            mark = " (interpolated)" if other.interpolated else ""
            lines.append(Text(f"  {seconds(other.step_time):.4g} s{mark}  {answer.loss(other)}"))
            placed = ", ".join(f"{name}: {ranks}" for name, ranks in other.component_placement.items())
            lines.append(Text(f"    {placed}", style="dim"))
        lines.append(Text(""))
    if simulated:
        rows = [("simulated", "step", "mean", "p90")]
        for number, (option, found) in enumerate(zip((best, *answer.others), simulated, strict=True)):
            name = "the best" if number == 0 else f"alternative {number}"
            rows.append((name, f"{seconds(option.step_time):.4g} s", f"{found.mean:.4g} s", f"{found.p90:.4g} s"))
        lines += [aligned(rows), Text("")]
    return Text("\n").join(lines[:-1])


def doubts_text(setup: Setup, doubts: Sequence[Doubt]) -> Text:
    """Say which measurements decide."""
    if not doubts:
        return Text("no measurement that is 10 % off changes the winner")
    words = ["slower" if doubt.factor > 1 else "quicker" for doubt in doubts]
    said = [setup.measurement(doubt.call, doubt.kind, doubt.devices) for doubt in doubts]
    lines = at_most([f"{text} if it is 10 % {word}" for text, word in zip(said, words, strict=True)], _MOST_DOUBTS)
    title = Text("measurements that would change the winner", style="bold")
    return Text("\n").join([title, *(Text(f"  {line}") for line in lines)])


def _idle(option: Option) -> str:
    idle = [f"{name} idles {share.idle * 100:.0f} %" for name, share in option.shares().items() if round(share.idle, 2)]
    return join_words(idle)


def _interpolated(option: Option) -> list[Text]:
    if not option.interpolated:
        return []
    text = f"this rests on times that were not measured; measure {join_words(option.interpolated)} to decide"
    return [Text(text, style="yellow"), Text("")]
