"""What the site leaves out of pages: the list of a page's own headings, which the site shows beside it.

On a repository host there is no such column, so the pages keep the list.
"""

from __future__ import annotations

import re
from typing import Any

_CONTENTS = re.compile(r"^(?:- \[[^\]]*\]\(#[^)]*\)\n)+\n?", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Remove the list of links to headings above the first heading of the second level."""
    top, mark, rest = markdown.partition("\n## ")
    return _CONTENTS.sub("", top) + mark + rest
