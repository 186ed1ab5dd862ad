"""The code blocks of a page: their text, and the notes in the comment before them.

A comment `<!-- key: value; key -->` before a block holds its notes. `ray: 2x4,1x0` is for blocks that need a live
cluster, `needs: hydra` for those of them that need a package which is not ours, `shown` for blocks that are read and
never run, such as a script for another scheduler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- (?P<notes>[^\n]*?) -->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str
    notes: dict[str, str]
    follows: bool
    """Whether there is no text between this block and the one before it."""

    @property
    def file(self) -> str | None:
        """The file that the first line names, as in `# file: job.yaml`."""
        named = re.match(r"# file: (\S+)\n", self.text)
        return named[1] if named else None


def specs_of(page: Path) -> list[str]:
    """The clusters that a page needs."""
    return sorted({block.notes["ray"] for block in blocks_of(page) if "ray" in block.notes})


def blocks_of(page: Path) -> list[Block]:
    content = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end = 0
    for match in _BLOCK.finditer(content):
        notes = dict((part.strip() + ":").split(":", 1) for part in (match["notes"] or "").split(";"))
        notes = {key.strip(): value.strip(" :") for key, value in notes.items() if key.strip()}
        line = content.count("\n", 0, match.start()) + 1
        follows = bool(found) and not content[end : match.start()].strip()
        end = match.end()
        found.append(Block(line=line, language=match["language"], text=match["text"], notes=notes, follows=follows))
    return found
