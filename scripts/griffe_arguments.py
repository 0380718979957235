"""For the API reference: in docstrings, a line that begins with an argument's name is an item of a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ARGUMENT = re.compile(r"^(?=``[^`]+``(?:(?:,| and| or) ``[^`]+``)*: )", re.M)


class Arguments(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            before, *items = _ARGUMENT.split(obj.docstring.value)
            # What follows the last item in a paragraph of its own is no part of the list.
            obj.docstring.value = before.rstrip() + "\n\n" + "".join(f"- {item}" for item in items)
