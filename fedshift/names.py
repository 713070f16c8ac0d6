"""Names that users give: what `module:function` stands for, and what a name that is not known was meant to be."""

import importlib
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any


def suggest(name: str, names: Iterable[str]) -> str:
    """
    >>> suggest("lrr", ["lr", "epochs"]), suggest("x", ["lr", "epochs"])
    ("did you mean 'lr'?", 'there are lr, epochs')
    """
    known = list(names)
    close = get_close_matches(name.lower(), known, 1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


def named(name: str) -> Callable[..., Any]:
    """The function that `module:function` stands for, with the current folder among the places to look."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError("must be module:function")
    before = list(sys.path)
    sys.path.insert(0, "")  # the current folder
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module was found; what it imports was not
        raise ValueError(f"no module {module!r} here or on the path") from error
    finally:
        sys.path[:] = before
    found = getattr(loaded, function, None)
    if not callable(found):
        there = [key for key, value in vars(loaded).items() if callable(value)][:8]
        raise ValueError(f"no function {function!r} in {module}; {suggest(function, there)}")
    return found  # type: ignore[no-any-return]
