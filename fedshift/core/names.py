"""Names that users give: what `module:function` stands for, what a name that is not known was meant to be, and text
that is safe to show.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

# C0, DEL, C1, line and paragraph separators, bidirectional embeddings, overrides and isolates, lone surrogates
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    r"""Text from elsewhere, safe for a terminal or a log: characters that control either are escaped, but for `keep`.

    >>> print(printable("\x1b[2Jgrün\r\n\u202e"), printable("two\nlines", keep="\n").splitlines())
    \x1b[2Jgrün\x0d\x0a\u202e ['two', 'lines']
    """
    return UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escaped(ord(found[0])), text)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


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
