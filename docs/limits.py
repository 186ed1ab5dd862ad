"""Write the tables of "Who waits how long" in the page on failures, from every `limits.py` of the package.

`python docs/limits.py` rewrites them; a test compares them with the code.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "concepts" / "failures.md"
BEGIN, END = "<!-- limits: written by docs/limits.py -->", "<!-- end of limits -->"
TITLES = {
    "machine": "Processes and files of a machine",
    "runtime": "Clusters, jobs and groups",
    "comm": "Messages and channels",
    "weights": "Weights",
    "rl": "Engines, router and manager",
    "compat": "Programs of other frameworks",
    "testing": "Local clusters",
    "doctor": "The doctor",
    "watch": "Views of a run",
    "cli": "Commands",
    "demo": "The demo",
}
"""Each room that has limits, as the page names it."""


def limits_of(room: str) -> dict[str, tuple[float | tuple[float, float], str]]:
    """Return every constant of a room's limits: its value, and its sentence."""
    module = importlib.import_module(f"roost.{room}.limits")
    body = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body
    found = {}
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                raise ValueError(f"roost.{room}.limits: {name} has no sentence")
            found[name] = getattr(module, name), " ".join(str(after.value.value).split())
    return found


def row(name: str, value: float | tuple[float, float], sentence: str) -> str:
    """Return the line of one constant."""
    numbers = value if isinstance(value, tuple) else (value,)
    shown = " to ".join(f"{number:,.4f}".rstrip("0").rstrip(".") for number in numbers)
    return f"| `{name}` | {shown} | {sentence} |"


def tables() -> str:
    """Return the tables of all rooms."""
    parts = []
    for room, title in TITLES.items():
        rows = [row(name, *limit) for name, limit in limits_of(room).items()]
        head = ["| constant | seconds | who waits for what |", "|---|---|---|"]
        parts.append("\n".join([f"### {title}", "", f"`src/roost/{room}/limits.py`:", "", *head, *rows]))
    return "\n\n".join(parts)


def main() -> None:
    """Rewrite the tables."""
    content = PAGE.read_text(encoding="utf-8")
    before, _, rest = content.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
