"""The house rules, read from the source with `ast`: floor plan, sizes, bans, docstrings, exports."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median, quantiles

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "polydraft"
LAB = "polydraft_lab"
"""The package in `lab/` beside `src/`: it may import every room, and one file alone imports it."""
JOINING = "cli/commands.py"
FLOORS = [
    ["errors", "extras", "options", "probs", "fetched", "machine_code"],
    ["schemes", "rows"],
    ["theory", "trees"],
    ["verifiers", "models"],
    ["reading"],
    ["drafters", "fetching"],
    ["catalogue"],
    ["planning"],
    ["engine", "training"],
    ["bench", "conformance"],
]
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
LEVELS |= {"polydraft": 10, "cluster": 11, "server": 12, "integrations": 12, "cli": 13, "__main__": 13, LAB: 14}
NARROW = {
    "extras": {"errors"},
    "options": {"errors", "fetched"},
    "probs": {"errors", "options"},
    "models": {"probs", "errors", "extras", "fetched"},
    "reading": {"models", "trees", "rows", "probs", "errors"},
    "drafters": {"reading", "models", "trees", "schemes", "rows", "probs", "machine_code", "errors"},
}
DOORS = {"transformers", "tokenizers", "safetensors"}
NAMELESS = {"utils", "common", "helpers", "core", "base", "misc"}
LAZY = "__init__.py"
"""The package's own entrance loads a name when it is asked for; `tests/test_start_up.py` looks at it."""
SPECIAL = {"__all__", "__version__"}
MOST_FILES, MOST_MEMBERS, MOST_LINES_OF_LAB = 12, 24, 5350
MEMBERS = {"schemes", "drafters", "drafters/text", "verifiers/nodes"}
"""Rooms of one file per member, which grow by a file with every new one."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """A source file: its path inside the package, or that of the lab from the root, and its text."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def name(self) -> str:
        parts = Path(self.path).with_suffix("").parts
        return ".".join(parts[1:] if parts[0] == "lab" else ["polydraft", *parts]).removesuffix(".__init__")

    @property
    def room(self) -> str:
        return LAB if self.path.startswith("lab/") else room_of(self.name)

    def of(self, *kinds: type) -> Iterator:
        return (node for node in self.nodes if isinstance(node, kinds))

    def imports(self) -> Iterator[str]:
        for node in self.of(ast.Import):
            yield from (alias.name for alias in node.names)
        for node in self.of(ast.ImportFrom):
            yield "." * node.level + (node.module or "")

    def calls(self) -> Iterator[str]:
        return (ast.unparse(node.func) for node in self.of(ast.Call))

    def lengths(self) -> list[int]:
        return [node.end_lineno - node.lineno + 1 for node in self.of(*FUNCTIONS)]


def room_of(name: str) -> str:
    first, *rooms = name.split(".")
    return LAB if first == LAB else ".".join(rooms[:1]) or "polydraft"


def floor_plan(module: Module) -> Iterator[str]:
    if module.room not in LEVELS:
        yield f"room {module.room} has no floor"
    allowed = {room for room in LEVELS if LEVELS[room] < LEVELS.get(module.room, 0)}
    allowed = NARROW.get(module.room, allowed) | {module.room}
    for name in module.imports():
        ours = name.split(".")[0] in ("polydraft", LAB) and not (room_of(name) == LAB and module.path == JOINING)
        if name.startswith(".") or (ours and room_of(name) not in allowed):
            yield f"imports {name}"


def doors(module: Module) -> Iterator[str]:
    if module.room not in ("models", "training"):
        yield from (f"imports {name}" for name in module.imports() if name.split(".")[0] in DOORS)


def ceilings(module: Module) -> Iterator[str]:
    if len(module.text.splitlines()) > 500:
        yield "has more than 500 lines"
    yield from (f"has a function of {length} lines" for length in module.lengths() if length > 80)


def file_name(module: Module) -> Iterator[str]:
    yield from (f"is called {part}" for part in module.name.split(".") if part in NAMELESS)


def bans(module: Module) -> Iterator[str]:
    yield from (f"line {node.lineno}: global" for node in module.of(ast.Global))
    yield from (f"line {node.lineno}: bare except" for node in module.of(ast.ExceptHandler) if node.type is None)
    yield from (f"line {node.lineno}: star import" for node in module.of(ast.alias) if node.name == "*")
    for call in module.calls():
        last = call.split(".")[-1]
        is_script = str(Path(module.path).parent) == "lab"
        may_print = module.room == "cli" or is_script or Path(module.path).stem in ("report", "reports")
        if call == "hasattr" or call.endswith(".cuda") or (call == "print" and not may_print):
            yield f"calls {call}"
        if last in ("manual_seed", "manual_seed_all"):
            everywhere = re.fullmatch(r"(torch\.(\w+\.)*)?manual_seed(_all)?", call)
            if module.room != ("training" if everywhere else "probs"):
                yield f"calls {call}"


def docstrings(module: Module) -> Iterator[str]:
    if not ast.get_docstring(module.nodes[0]):
        yield "has no docstring"
    for owner in [module.nodes[0], *(one for one in module.of(ast.ClassDef) if not one.name.startswith("_"))]:
        for node in owner.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
                if not ast.get_docstring(node):
                    yield f"{node.name} has no docstring"


def entrance(module: Module) -> Iterator[str]:
    if not module.path.endswith("__init__.py") or module.path == LAZY:
        return
    body = module.nodes[0].body[bool(ast.get_docstring(module.nodes[0])) :]
    brought = {one.asname or one.name for node in body if isinstance(node, ast.ImportFrom) for one in node.names}
    assigned = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
    if any(not isinstance(node, ast.ImportFrom | ast.Assign) for node in body) or assigned.keys() - SPECIAL:
        yield "holds more than imports, docstring and __all__"
    exported = ast.literal_eval(assigned["__all__"]) if "__all__" in assigned else []
    if {*exported} != brought | (assigned.keys() - {"__all__"}):
        yield f"__all__ differs in {sorted({*exported} ^ brought)}"
    if exported != sorted(exported, key=ruff_order):
        yield "__all__ is not sorted"


def ruff_order(name: str) -> tuple:
    numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
    return 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, numbers


def cycles(house: Sequence[Module]) -> Iterator[str]:
    graph = {one.name: {name for name in one.imports() if name.split(".")[0] in ("polydraft", LAB)} for one in house}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield " -> ".join(error.args[1])


def crowding(house: Sequence[Module]) -> Iterator[str]:
    files = Counter(str(Path(one.path).parent) for one in house)
    for room, count in files.items():
        if count > (MOST_MEMBERS if room in MEMBERS else MOST_FILES):
            yield f"room {room} holds {count} files"


def usual_lengths(house: Sequence[Module]) -> Iterator[str]:
    lengths = [length for one in house for length in one.lengths()]
    if median(lengths) > 12:
        yield f"the median function has {median(lengths)} lines"
    if quantiles(lengths, n=10)[-1] > 40:
        yield f"a tenth of the functions has over {quantiles(lengths, n=10)[-1]} lines"


RUN = 12
"""How many equal lines are too many."""
BOILERPLATE = ("cache: Cache,", 'mask: Bool[Tensor, "b n m"],')
"""Lines of a run that may repeat: the arguments of a pass."""
PROTOCOLS = ("law.py", "contract.py", "language_model.py")
CONTRACTS = {"NodeVerifier", "ScalableVerifier", "TreeVerifier", "PathVerifier", "Scheme"}
"""What a rule or a scheme is; what else it can do, `traits` and the scheme's own attributes say."""


def members(house: Sequence[Module]) -> dict[str, str]:
    """Return the room of every concrete scheme, rule, drafter, model and policy, and of what rules can do besides."""
    kinds = {
        "schemes": "",
        "verifiers/nodes": "",
        "verifiers/trees": "",
        "drafters": "Draft",
        "models": "Model",
        "trees/policy.py": "",
    }
    found = dict[str, str]()
    for module in house:
        for place, part in kinds.items():
            if module.path.startswith(place) and not module.path.endswith(
                ("law.py", "contract.py", "language_model.py")
            ):
                names = (node.name for node in module.of(ast.ClassDef) if not is_protocol(node))
                found |= {name: module.room for name in names if part in name and not name.endswith("Policy")}
        if module.room in ("schemes", "verifiers"):
            found |= {node.name: module.room for node in module.of(ast.ClassDef) if is_protocol(node)}
    return {name: room for name, room in found.items() if name not in CONTRACTS}


def is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def names_in(module: Module, expression: ast.AST) -> set[str]:
    """Return the names in an expression, and those in the module's constants that it names."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    constants = [node.value for node in module.of(ast.Assign) if {ast.unparse(one) for one in node.targets} & names]
    return names.union(*(names_in(module, value) for value in constants if isinstance(value, ast.Tuple | ast.BinOp)))


def questions_of_type(house: Sequence[Module]) -> Iterator[str]:
    """Find questions for a member's class outside its room: what a member can do, its attributes say."""
    rooms = members(house)
    for module in house:
        for call in module.of(ast.Call):
            asks = ast.unparse(call.func) in ("isinstance", "issubclass") and len(call.args) == 2
            named = names_in(module, call.args[1]) if asks else set()
            strange = sorted(name for name in named if rooms.get(name, module.room) != module.room)
            yield from (f"{module.path} line {call.lineno} asks for {name}" for name in strange)
        if "__mro__" in module.text and module.room in ("verifiers", "catalogue", "engine"):
            yield f"{module.path} looks where methods are defined"


def names_that_stand_once(house: Sequence[Module]) -> Iterator[str]:
    ours = [one for one in house if one.room != LAB]
    files = Counter(Path(one.path).name for one in ours)
    kinds = Counter(node.name for one in ours for node in one.of(ast.ClassDef))
    for what, counts in {"file": files, "class": kinds}.items():
        yield from (
            f"{what} name {name} stands {count} times"
            for name, count in counts.items()
            if count > 1 and name != "__init__.py"
        )


def equal_runs(house: Sequence[Module]) -> Iterator[str]:
    """Find runs of 12 lines that stand twice; what is imported, and the arguments of a pass, stand where they are."""
    seen = dict[tuple[str, ...], tuple[str, int]]()
    for module in (one for one in house if one.room != LAB):
        lines = [(at, line.strip()) for at, line in enumerate(module.text.splitlines(), 1) if line.strip()]
        lines = [(at, line) for at, line in lines if not line.startswith(("import ", "from "))]
        for first in range(len(lines) - RUN + 1):
            run = tuple(line for _, line in lines[first : first + RUN])
            place = module.path, lines[first][0]
            other = seen.setdefault(run, place)
            if other != place and not {*BOILERPLATE} <= {*run}:
                yield f"{module.path} line {place[1]} repeats {other[0]} line {other[1]}"


def wide_protocols(house: Sequence[Module]) -> Iterator[str]:
    for module in house:
        for node in (one for one in module.of(ast.ClassDef) if is_protocol(one)):
            told = [one.name for one in node.body if isinstance(one, FUNCTIONS)]
            told += [
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            ]
            public = {name for name in told if not name.startswith("_")}
            if len(public) > 8:
                yield f"{module.path}: {node.name} has {len(public)} public members"


def size_of_the_lab(house: Sequence[Module]) -> Iterator[str]:
    lines = sum(len(one.text.splitlines()) for one in house if one.room == LAB)
    if lines > MOST_LINES_OF_LAB:
        yield f"lab/ has {lines} lines"


MODULE_RULES = [floor_plan, doors, ceilings, file_name, bans, docstrings, entrance]
HOUSE_RULES = [
    *(cycles, crowding, usual_lengths, questions_of_type, size_of_the_lab),
    *(names_that_stand_once, equal_runs, wide_protocols),
]
HOUSE = [Module(str(path.relative_to(PACKAGE)), path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
HOUSE += [Module(str(path.relative_to(ROOT)), path.read_text()) for path in sorted((ROOT / "lab").rglob("*.py"))]


@pytest.mark.parametrize("rule", MODULE_RULES)
def test_every_module_keeps_the_rule(rule: Callable[[Module], Iterator[str]]) -> None:
    assert not [f"{module.path} {finding}" for module in HOUSE for finding in rule(module)]


@pytest.mark.parametrize("rule", HOUSE_RULES)
def test_the_house_keeps_the_rule(rule: Callable[[Sequence[Module]], Iterator[str]]) -> None:
    assert not list(rule(HOUSE))


BAD_MODULES = [
    (floor_plan, "trees/x.py", "from polydraft.engine import Run"),
    (floor_plan, "verifiers/x.py", "import polydraft.models.cache"),
    (floor_plan, "models/x.py", "def f():\n    from polydraft.trees import TokenTree"),
    (floor_plan, "drafters/x.py", "from polydraft.verifiers import TopDown"),
    (floor_plan, "errors.py", "from polydraft.probs import sample"),
    (floor_plan, "engine/x.py", "from polydraft import generate"),
    (floor_plan, "engine/x.py", "from .run import Run"),
    (floor_plan, "attic/x.py", ""),
    (floor_plan, "bench/x.py", "from polydraft_lab.limits import Models"),
    (floor_plan, "cli/x.py", "import polydraft_lab"),
    (floor_plan, "lab/polydraft_lab/x.py", "from .limits import Models"),
    (bans, "lab/polydraft_lab/x.py", "print(1)"),
    (doors, "engine/x.py", "from transformers.generation import LogitsProcessor"),
    (doors, "cli.py", "import tokenizers"),
    (ceilings, "engine/x.py", "\n" * 501),
    (ceilings, "engine/x.py", "def f():" + "\n    pass" * 80),
    (file_name, "engine/utils.py", ""),
    (file_name, "misc/x.py", ""),
    *((bans, "engine/x.py", text) for text in ("from math import *", "print(1)", "hasattr(x, 'y')", "x.y.cuda()")),
    *((bans, "engine/x.py", text) for text in ("try:\n    f()\nexcept:\n    f()", "def f():\n    global x")),
    *((bans, "probs.py", text) for text in ("torch.manual_seed(0)", "torch.cuda.manual_seed_all(0)", "manual_seed(0)")),
    (bans, "training/x.py", "Generator('cpu').manual_seed(0)"),
    *((docstrings, "engine/x.py", text) for text in ("x = 1", "'''Say.'''\ndef f(): ...", "'''Say.'''\nclass A: ...")),
    (docstrings, "engine/x.py", "'''Say.'''\nclass A:\n    '''Say.'''\n    def f(self): ..."),
    (entrance, "engine/__init__.py", "from polydraft.engine.run import Run\n__all__ = []"),
    (entrance, "engine/__init__.py", "__all__ = ['Run']"),
    (entrance, "engine/__init__.py", "from a import Run, X_2, f\n__all__ = ['Run', 'X_2', 'f']"),
    (entrance, "engine/__init__.py", "x = 1"),
    (entrance, "engine/__init__.py", "def f(): ..."),
]
LONG = "def f():" + "\n    pass" * 13
BAD_HOUSES = [
    (cycles, [Module("a.py", "import polydraft.b"), Module("b.py", "def f():\n    from polydraft.a import x")]),
    (crowding, [Module(f"trees/x{number}.py", "") for number in range(13)]),
    (crowding, [Module(f"schemes/x{number}.py", "") for number in range(25)]),
    (usual_lengths, [Module("a.py", LONG), Module("b.py", LONG)]),
    (usual_lengths, [Module("a.py", "def f(): ...\n" * 8 + "def g():" + "\n    pass" * 60 + "\n" + LONG)]),
]
RULE = Module("verifiers/nodes/a.py", "class Fair: ...")
BAD_HOUSES += [
    (questions_of_type, [RULE, Module("engine/b.py", "isinstance(rule, Fair | Other)")]),
    (
        questions_of_type,
        [Module("drafters/a.py", "class ADrafter: ..."), Module("cli/b.py", "isinstance(x, (ADrafter,))")],
    ),
    (questions_of_type, [Module("engine/b.py", "kind.__mro__")]),
    (
        cycles,
        [
            Module("lab/polydraft_lab/a.py", "from polydraft_lab.b import x"),
            Module("lab/polydraft_lab/b.py", "import polydraft_lab.a"),
        ],
    ),
    (size_of_the_lab, [Module("lab/polydraft_lab/a.py", "\n" * 2676), Module("lab/b.py", "\n" * 2675)]),
]
SAME = "\n".join(f"x{number} = {number}" for number in range(12))
MEMBERS_OF_NINE = "\n".join(f"    def m{number}(self): ..." for number in range(9))
BAD_HOUSES += [
    (names_that_stand_once, [Module("trees/x.py", ""), Module("engine/x.py", "")]),
    (names_that_stand_once, [Module("trees/x.py", "class A: ..."), Module("engine/y.py", "class A: ...")]),
    (equal_runs, [Module("trees/x.py", SAME), Module("engine/y.py", f"y = 3\n{SAME}\nz = 4")]),
    (equal_runs, [Module("trees/x.py", f"{SAME}\n\n{SAME}")]),
    (wide_protocols, [Module("trees/x.py", f"class A(Protocol):\n{MEMBERS_OF_NINE}")]),
]
SCHEME = Module("schemes/a.py", "class Fresh(SchemeOfLaw): ...")
TRAIT = Module("verifiers/outcome_law.py", "class CanDo(Protocol): ...")
BAD_HOUSES += [
    (questions_of_type, [SCHEME, Module("theory/b.py", "isinstance(scheme, Fresh)")]),
    (questions_of_type, [SCHEME, Module("verifiers/b.py", "ALL = (Fresh, Other)\nisinstance(scheme, ALL)")]),
    (questions_of_type, [TRAIT, Module("engine/b.py", "isinstance(rule, CanDo)")]),
]
GOOD = "'''Say.'''\nfrom polydraft.errors import InvalidParameter\ndef f():\n    '''Say.'''\n    console.print(1)"


@pytest.mark.parametrize(("rule", "path", "text"), BAD_MODULES)
def test_each_rule_sees_a_bad_module(rule: Callable[[Module], Iterator[str]], path: str, text: str) -> None:
    assert list(rule(Module(path, text)))


@pytest.mark.parametrize(("rule", "house"), BAD_HOUSES)
def test_each_rule_sees_a_bad_house(rule: Callable[[Sequence[Module]], Iterator[str]], house: list[Module]) -> None:
    assert list(rule(house))


def test_no_rule_goes_untested_and_none_complains_of_a_good_module() -> None:
    assert {rule for rule, *_ in BAD_MODULES} == {*MODULE_RULES}
    assert {rule for rule, *_ in BAD_HOUSES} == {*HOUSE_RULES}
    assert not [finding for rule in MODULE_RULES for finding in rule(Module("probs.py", GOOD))]


def test_the_lab_may_import_every_room_and_one_file_imports_it() -> None:
    assert not list(floor_plan(Module("lab/polydraft_lab/x.py", "import polydraft.cli\nimport polydraft_lab.limits")))
    assert not list(floor_plan(Module("lab/x.py", "import polydraft.server\nfrom polydraft_lab.limits import Models")))
    assert not list(floor_plan(Module(JOINING, "from polydraft_lab.commands.lab_commands import COMMANDS")))
    assert not list(bans(Module("lab/x.py", "print(1)"))), "scripts print"


@pytest.mark.parametrize("room", sorted(MEMBERS))
def test_there_is_room_for_new_members(room: str) -> None:
    """A new rule, scheme or drafter is a new file (CONTRIBUTING.md); the house must not stand against it."""
    assert any(module.path.startswith(f"{room}/") for module in HOUSE)
    new = [Module(f"{room}/a_new_one_{number}.py", GOOD) for number in range(4)]
    assert not list(crowding([*HOUSE, *new]))


def test_the_floors_in_the_docs_are_those_that_are_kept() -> None:
    rows = re.findall(r"^\| (\d+) \| `([a-z_]+)(?:/|\.py)` \|", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    told = {"polydraft" if room == "__init__" else room: int(level) for level, room in rows}
    assert told == {room: level for room, level in LEVELS.items() if room != LAB}
