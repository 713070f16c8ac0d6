"""Names from users: `module:function`, suggestions for unknown names, and safe printing."""

import importlib
import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

# C0, DEL, C1, line and paragraph separators, bidirectional embeddings, overrides and isolates, lone surrogates
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    r"""Escape control characters in untrusted text for terminals and logs, except those in `keep`.

    >>> print(printable("\x1b[2Jgrün\r\n\u202e"), printable("two\nlines", keep="\n").splitlines())
    \x1b[2Jgrün\x0d\x0a\u202e ['two', 'lines']
    """
    return UNSAFE.sub(lambda match: match[0] if match[0] in keep else _escaped(ord(match[0])), text)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def suggest(name: str, names: Iterable[str], most: int | None = None) -> str:
    """Hint on an unknown name: a similar one, or all known ones, of which up to `most` are listed.

    >>> suggest("lrr", ["lr", "epochs"]), suggest("x", ["lr", "epochs"])
    ("did you mean 'lr'?", 'known are lr, epochs')
    """
    known = list(names)
    by_lower = {key.lower(): key for key in known}
    close = get_close_matches(name.lower(), by_lower, 1)
    return f"did you mean {by_lower[close[0]]!r}?" if close else f"known are {', '.join(known[:most])}"


def named(name: str) -> Callable[..., Any]:
    """Import the function named by `module:function`; the current folder is searched as well."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError("must be module:function")
    before = list(sys.path)
    sys.path.insert(0, "")  # the current folder
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module was found, but not one that it imports
        raise ValueError(f"no module {module!r} in the current folder or on the Python path") from error
    finally:
        sys.path[:] = before
    target = getattr(loaded, function, None)
    if not callable(target):
        functions = [key for key, value in vars(loaded).items() if callable(value)]
        raise ValueError(f"no function {function!r} in {module}; {suggest(function, functions, 8)}")
    return target  # type: ignore[no-any-return]
