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
    more = ", ..." if most and len(known) > most else ""
    return f"did you mean {by_lower[close[0]]!r}?" if close else f"known are {', '.join(known[:most])}{more}"


def _defined_in(module: str, x: object) -> bool:
    """True if a function or class is defined in this module or in a part of this package, not imported from another."""
    return f"{getattr(x, '__module__', module)}.".startswith(f"{module}.")


def named(name: str) -> Callable[..., Any]:
    """Import the function named by `module:function`; the current folder is searched as well."""
    module, _, function = name.partition(":")
    if not function or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError("must be module:function, where module is a name such as mine or package.mine")
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
        own = [key for key, x in vars(loaded).items() if callable(x) and _defined_in(module, x)]
        hint = suggest(function, own, 8) if own else "it defines none"
        raise ValueError(f"no function {function!r} in {module}; {hint}")
    return target  # type: ignore[no-any-return]
