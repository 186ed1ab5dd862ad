"""For the pages of the Python reference: docstrings and classes as a reader wants to see them."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SESSION = re.compile(r"^(?:>>> .*\n?)(?:\S.*\n?)*", re.M)


class Readable(griffe.Extension):
    """Sessions at the prompt become code, and methods decorated with `fact` are shown as the properties they are."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples: Markdown takes `>>>` for a quotation in a quotation in a quotation."""
        if obj.docstring is not None:
            obj.docstring.value = _SESSION.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Make attributes of what is read without a call."""
        for name, member in list(cls.members.items()):
            if isinstance(member, griffe.Function) and any(str(mark.value) == "fact" for mark in member.decorators):
                known = griffe.Attribute(
                    name, annotation=member.returns, docstring=member.docstring, lineno=member.lineno, parent=cls
                )
                cls.set_member(name, known)
