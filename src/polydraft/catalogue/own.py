"""Rules and drafters of a user's own: FILE.py:CLASS becomes a line of the tables, as if it had been written there.

A file that is named is run. So only the command line calls this, where whoever names it runs it; a request to a server
never does.
"""

import inspect
import re
import sys
import traceback
from hashlib import sha256
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import polydraft.catalogue.tables as tables
from polydraft.catalogue.lines import DrafterLine, LimitsEntry, RuleLine
from polydraft.errors import InvalidParameter, PolydraftError, lowered, near

if TYPE_CHECKING:
    from polydraft.drafters import Drafter

PAGE = "docs/own_rule_and_drafter.md"
FILE = re.compile(r"(?P<file>.+\.py)(?::(?P<kind>.*))?")
OURS = "polydraft_own_"
"""How the modules begin that users' files become."""
VERBS = ("check", "start", "draft", "commit")


def names_file(text: str) -> bool:
    """Tell whether a text names a class in a file, as FILE.py:CLASS, and nothing that the catalogue has."""
    return FILE.fullmatch(text) is not None and not any(
        line.is_named(text) for line in tables.DRAFTERS if not line.digest
    )


def own_rule(text: str) -> RuleLine:
    """Load the rule that FILE.py:CLASS names, and put its line into the table.

    Raises:
        InvalidParameter: there is no such file or class, it ends in an error, or it is no rule.
    """
    from polydraft.verifiers import NodeVerifier, ScalableVerifier, TreeVerifier

    kind, digest = _class_in(text)
    rule = _built(kind, text)
    if not isinstance(rule, NodeVerifier | TreeVerifier):
        verb = ("verify",) if getattr(kind, "verify", None) else ("law", "acceptance")
        absent = [one for one in ("scheme", "name", "lossless", *verb) if getattr(rule, one, None) is None]
        raise InvalidParameter(f"{text} is no verification rule: it lacks {', '.join(absent)} ({PAGE}).")
    others = [line for line in tables.RULES if line.word != text]
    known = {name for line in others for name in (line.name, line.measured.label, line.measured.short)}
    lifted = isinstance(rule, ScalableVerifier) and rule.scheme.independent
    measured = LimitsEntry(text if rule.name in known else "", bottom_up=(rule.scheme,) if lifted else ())
    told = {"own_name": rule.name, "lossless": rule.lossless}
    line = RuleLine(text, kind, measured=measured, digest=digest, **told)
    tables.RULES = (*others, line)
    return line


def own_drafter(text: str) -> DrafterLine:
    """Load the drafter that FILE.py:CLASS names, and put its line into the table.

    Raises:
        InvalidParameter: there is no such file or class, it ends in an error, or it is no drafter.
    """
    from polydraft.drafters import Drafter

    kind, digest = _class_in(text)
    if Drafter not in inspect.getmro(kind):
        raise InvalidParameter(f"{text} is no drafter: derive it from polydraft.Drafter ({PAGE}).")
    drafter = _built(kind, text)
    absent = [] if isinstance(getattr(drafter, "name", None), str) else ["name"]
    absent += [verb for verb in VERBS if getattr(kind, verb) is getattr(Drafter, verb)]
    if absent:
        raise InvalidParameter(f"{text} is no whole drafter: it lacks {', '.join(absent)} ({PAGE}).")
    line = DrafterLine(text, kind, bound=_bound(drafter), digest=digest)
    tables.DRAFTERS = (*(one for one in tables.DRAFTERS if one.word != text), line)
    return line


def digests() -> dict[str, str]:
    """Return the digests of the files of a user's own rules and drafters that are in the tables, by their words."""
    return {line.word: line.digest for line in (*tables.RULES, *tables.DRAFTERS) if line.digest}


def blamed(error: BaseException) -> str:
    """Return where in a user's own file an error came from, and what it is; empty if it came from elsewhere."""
    if isinstance(error, SyntaxError):
        own = {module.__file__ for name, module in sys.modules.items() if name.startswith(OURS)}
        if error.filename in own:
            return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [*traceback.walk_tb(error.__traceback__)]
    places = [(frame.f_code.co_filename, line) for frame, line in frames if _is_own(frame.f_globals.get("__name__"))]
    said = " ".join(str(error).split()).rstrip(".")
    return f"{places[-1][0]}, line {places[-1][1]}: {type(error).__name__}: {said}" if places else ""


def _is_own(module: object) -> bool:
    return isinstance(module, str) and module.startswith(OURS)


def _bound(drafter: "Drafter") -> Any:
    """Return the scheme that a drafter drafts under, if it is the only one."""
    from polydraft.drafters import drafts_under

    able = [line.scheme for line in tables.SCHEMES if drafts_under(drafter, line.scheme)]
    return able[0] if len(able) == 1 else None


def _class_in(text: str) -> tuple[type, str]:
    found = FILE.fullmatch(text)
    file, name = (found["file"], found["kind"]) if found else (text, None)
    module, digest = _module(Path(file).expanduser(), file)
    classes = [
        one for one, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    if not name:
        there = f"it has {', '.join(classes)}" if classes else "it has none"
        raise InvalidParameter(f"{file} is a file: say which class of it is meant, as {file}:CLASS; {there}.")
    kind = vars(module).get(name)
    if isinstance(kind, type):
        return kind, digest
    meant = near(name, classes)
    there = f" (did you mean {meant}?)." if meant else f"; it has {', '.join(classes) or 'none'}."
    raise InvalidParameter(f"There is no class {name!r} in {file}{there}")


def _module(path: Path, shown: str) -> tuple[ModuleType, str]:
    """Run a file as a module, once as long as it stays as it is; what lies beside it can be imported from it."""
    try:
        path = path.resolve()
        code = path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InvalidParameter(f"The file {shown} cannot be read: {reason}.") from error
    digest = sha256(code).hexdigest()[:16]
    name = f"{OURS}{sha256(str(path).encode()).hexdigest()[:8]}_{digest}"
    if name in sys.modules:
        return sys.modules[name], digest
    module = sys.modules[name] = module_from_spec(ModuleSpec(name, None, origin=str(path)))
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(code, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        told = blamed(error) or f"{type(error).__name__}: {error}"
        del sys.modules[name]
        raise InvalidParameter(f"The file {shown} ends in an error: {told}.") from error
    return module, digest


def _built(kind: type, text: str) -> Any:
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise InvalidParameter(
            f"{text} cannot be built without arguments ({error}): give each argument a default."
        ) from error
    except ValueError:  # a class whose arguments are not told
        pass
    try:
        return kind()
    except PolydraftError as error:
        raise InvalidParameter(f"{text} cannot be built: {lowered(error)}") from error
    except Exception as error:
        told = blamed(error) or f"{type(error).__name__}: {error}"
        raise InvalidParameter(f"{text} cannot be built: {told}.") from error
