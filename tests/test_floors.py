"""The floors hold: imports point down only, and what a floor may not touch it does not touch.

Every module of the library has a row in `FLOORS`, first match wins. A module's imports are read
from its syntax tree, those inside functions and behind `TYPE_CHECKING` included.
"""

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("codec_jax", "experiments", "pallas_kernels")
MAX_LINES = 400


class Floor(NamedTuple):
    """Modules of one floor; `forbidden` are lower modules that they may not import either."""

    number: int
    modules: tuple[str, ...]
    forbidden: tuple[str, ...] = ()


FLOORS = (
    Floor(0, ("codec_jax.forest*", "codec_jax.pages"), ("pallas_kernels",)),
    Floor(0, ("pallas_kernels",), ("codec_jax",)),
    Floor(1, ("codec_jax.planning",)),
    Floor(2, ("codec_jax.attention*", "codec_jax.kv_cache", "codec_jax.partial")),
    Floor(
        3,
        ("codec_jax.models",),  # attention is injected
        (
            "codec_jax.attention*",
            "codec_jax.forest*",
            "codec_jax.kv_cache",
            "codec_jax.pages",
            "codec_jax.planning",
        ),
    ),
    Floor(3, ("codec_jax.flax",), ("codec_jax.forest*", "codec_jax.pages")),
    Floor(4, ("codec_jax.decode*", "codec_jax.prefill", "codec_jax.sampling")),
    Floor(5, ("codec_jax.generate*", "codec_jax")),
    Floor(6, ("experiments",)),
)
HOST_ONLY = FLOORS[0].modules
HOST_ONLY_IMPORTS = {"numpy", "jaxtyping", "codec_jax"}
IMPORTS_THE_KERNELS = (
    "codec_jax.attention",
    "codec_jax.attention_layer",
    "experiments.tune_kernels",
)
READS_FILES = (
    "codec_jax.models.gguf_file",
    "codec_jax.models.hf_files",
    "codec_jax.models.llama2c",
    "codec_jax.models.registry",
    "codec_jax.models.tokenizer",
    "codec_jax.planning.profiles",
    "pallas_kernels.tuning",
)
FIRST_FLOOR_WITH_ENVIRONMENT = 5

FILE_METHODS = {"open", "read_bytes", "read_text", "tofile", "write_bytes", "write_text"}
FILE_FUNCTIONS = {"fromfile", "genfromtxt", "load", "loadtxt", "memmap", "save", "savetxt", "savez"}


class Import(NamedTuple):
    """One imported name, absolute, and the line that imports it."""

    name: str
    line: int


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    """True if a pattern names the module or a package that holds it."""
    parts = module.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(prefix, pattern) for prefix in prefixes for pattern in patterns)


def floor_of(module: str) -> Floor | None:
    """The floor of a module. The bare package codec_jax is the library's door, on floor 5."""
    for floor in FLOORS:
        patterns = tuple(pattern for pattern in floor.modules if pattern != "codec_jax")
        if matches(module, patterns) or (module == "codec_jax" and module in floor.modules):
            return floor
    return None


def imports_of(tree: ast.AST, package: str, modules: frozenset[str]) -> Iterator[Import]:
    """All imports below `tree`, of a module inside `package`; names of `modules` are resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                inside = name in modules or base in ("absl", "os")
                yield Import(name if inside else base, node.lineno)


def import_errors(module: str, floor: Floor, imports: list[Import]) -> Iterator[str]:
    """What a module imports and may not."""
    for name, line in imports:
        root = name.split(".")[0]
        if matches(module, HOST_ONLY) and root not in HOST_ONLY_IMPORTS | sys.stdlib_module_names:
            yield f"{line}: host-only module imports {name}; NumPy and the library only"
        if root not in PACKAGES:
            continue
        target = floor_of(name)
        if target is None:
            yield f"{line}: imports {name}, which has no floor: add it to FLOORS in test_floors.py"
        elif target.number > floor.number or matches(name, floor.forbidden):
            yield f"{line}: floor {floor.number} may not import {name} (floor {target.number})"
        if root == "pallas_kernels" and not matches(
            module, (*IMPORTS_THE_KERNELS, "pallas_kernels")
        ):
            yield f"{line}: imports {name}; only {IMPORTS_THE_KERNELS} import the kernels"


def touches_files(call: ast.Call) -> bool:
    """True for `open`, a method of a path, and NumPy's readers and writers."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    return name in FILE_METHODS or (name in FILE_FUNCTIONS and owner in ("np", "numpy"))


def ambient_errors(
    tree: ast.AST, module: str, floor: Floor, imports: list[Import]
) -> Iterator[str]:
    """Prints, and below floor 5 flags, environment, dynamic imports and undeclared file access."""
    low = floor.number < FIRST_FLOOR_WITH_ENVIRONMENT
    if low:
        for name, line in imports:
            if name.startswith(("absl.flags", "os.environ", "os.getenv", "importlib.import_")):
                yield f"{line}: imports {name}; flags and environment are read on floors 5 and 6"
    for node in ast.walk(tree):
        if (
            low
            and isinstance(node, ast.Attribute)
            and ast.unparse(node)
            in (
                "os.environ",
                "os.getenv",
            )
        ):
            yield f"{node.lineno}: reads {ast.unparse(node)}; pass the value as an argument"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).split(".")[-1]
        if called == "print" and floor.number < 6:
            yield f"{node.lineno}: calls {ast.unparse(node.func)}; the library prints nothing"
        if called in ("__import__", "import_module"):
            yield f"{node.lineno}: calls {called}, which hides an import from this test"
        if low and touches_files(node) and not matches(module, READS_FILES):
            yield f"{node.lineno}: calls {ast.unparse(node.func)}; only {READS_FILES} touch files"


def errors_of(
    module: str, source: str, *, is_package: bool = False, modules: frozenset[str] = frozenset()
) -> list[str]:
    """Every broken rule of one module's source, each with its line."""
    floor = floor_of(module)
    if floor is None:
        return [f"{module} has no floor: add it to FLOORS in tests/test_floors.py"]
    tree = ast.parse(source)
    package = module if is_package else module.rpartition(".")[0]
    imports = list(imports_of(tree, package, modules))
    found = [*import_errors(module, floor, imports), *ambient_errors(tree, module, floor, imports)]
    return [f"{module}:{error}" for error in found]


def oracle_errors(source: str) -> list[str]:
    """What an oracle imports besides NumPy, the standard library and other oracles."""
    allowed = {"numpy"} | sys.stdlib_module_names
    return [
        f"{line}: an oracle imports NumPy only; got {name}"
        for name, line in imports_of(ast.parse(source), "tests", frozenset())
        if name.split(".")[0] not in allowed and not name.startswith(("oracle", "tests.oracle"))
    ]


def module_files() -> dict[str, Path]:
    """The library's and the experiments' modules by dotted name."""
    files = {}
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


MODULES = module_files()
NAMES = frozenset(MODULES)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_keeps_to_its_floor(module: str) -> None:
    path = MODULES[module]
    source = path.read_text(encoding="utf-8")
    errors = errors_of(module, source, is_package=path.name == "__init__.py", modules=NAMES)
    assert not errors, "\n".join(errors)


def test_modules_are_found() -> None:
    assert {"codec_jax", "pallas_kernels", "experiments"} <= NAMES


def test_no_file_is_long() -> None:
    paths = [*MODULES.values(), *(REPOSITORY / "tests").rglob("*.py")]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    too_long = {path.name: length for path, length in lengths.items() if length > MAX_LINES}
    assert not too_long, f"split these files, at most {MAX_LINES} lines: {too_long}"


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "tests").glob("oracle*.py")), ids=lambda path: path.name
)
def test_oracle_shares_nothing_with_the_library(path: Path) -> None:
    assert oracle_errors(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", ["jax", "codec_jax.partial", "scipy", "forests"])
def test_oracle_may_not_import(name: str) -> None:
    assert oracle_errors(f"import math\nimport numpy as np\nimport {name}") == [
        f"3: an oracle imports NumPy only; got {name}"
    ]


BROKEN = {
    "up": ("codec_jax.planning.cost", "from codec_jax.attention import attend"),
    "up, relative": ("codec_jax.planning.cost", "from ..models import llama"),
    "up, in a function": ("codec_jax.partial", "def f():\n    import codec_jax.decode"),
    "up, a name of the package": ("codec_jax.kv_cache", "from codec_jax import decode"),
    "the package's door": ("codec_jax.kv_cache", "from codec_jax import anything"),
    "experiments": ("codec_jax.generate", "import experiments.generate"),
    "JAX on the host floor": ("codec_jax.forest_arrays", "import jax.numpy as jnp"),
    "kernels on the host floor": ("codec_jax.pages", "import pallas_kernels"),
    "library in the kernels": ("pallas_kernels.merge", "from codec_jax.partial import Partial"),
    "kernels outside attention": ("codec_jax.decode", "from pallas_kernels import merge"),
    "kernels in experiments": ("experiments.speed", "import pallas_kernels.merge"),
    "attention in a model": ("codec_jax.models.llama", "from codec_jax.attention import attend"),
    "plan in a model": ("codec_jax.models.llama", "from codec_jax import planning"),
    "flags": ("codec_jax.decode", "from absl import flags"),
    "environment": ("codec_jax.decode", "import os\nx = os.environ['X']"),
    "environment, by name": ("pallas_kernels.merge", "from os import getenv"),
    "a file": ("codec_jax.sampling", "open('x')"),
    "a file by its path": ("codec_jax.planning.cost", "from pathlib import Path\nPath('x').open()"),
    "an array file": ("codec_jax.forest", "import numpy as np\nnp.load('x')"),
    "a file in a model": ("codec_jax.models.llama", "open('x')"),
    "a print": ("codec_jax.generate", "print(1)"),
    "a print inside jit": ("codec_jax.decode", "import jax\njax.debug.print('x')"),
    "a hidden import": ("codec_jax.decode", "import importlib\nimportlib.import_module('x')"),
    "an import without a floor": ("codec_jax.generate", "import codec_jax.helpers"),
    "a module without a floor": ("codec_jax.helpers", ""),
}

SOUND = {
    "its own floor": ("codec_jax.attention_xla", "from codec_jax.partial import Partial"),
    "down": ("codec_jax.generate", "from codec_jax import decode, forest, planning"),
    "down, relative": ("codec_jax.attention", "from .planning.plan import Plan"),
    "attention and the kernels": ("codec_jax.attention", "from pallas_kernels import merge"),
    "a declared reader": ("codec_jax.planning.profiles", "open('x')"),
    "a kernel's load": ("pallas_kernels.merge", "plgpu.load(ref, ())"),
    "a model with Partial": ("codec_jax.models.llama", "import codec_jax.partial"),
    "an experiment": ("experiments.speed", "import os\nfrom absl import flags\nprint(os.environ)"),
    "a word that starts alike": ("codec_jax.decode", "import pallas_kernels_of_others"),
}

KNOWN = frozenset({"codec_jax.decode", "codec_jax.forest", "codec_jax.planning", "codec_jax"})


@pytest.mark.parametrize("case", BROKEN)
def test_checker_refuses(case: str) -> None:
    module, source = BROKEN[case]
    errors = errors_of(module, source, modules=KNOWN)
    assert errors and all(error.startswith(module) for error in errors)


@pytest.mark.parametrize("case", SOUND)
def test_checker_accepts(case: str) -> None:
    module, source = SOUND[case]
    assert errors_of(module, source, modules=KNOWN) == []


def test_package_resolves_its_own_relative_imports() -> None:
    source = "from .cost import Cost\nfrom ..decode import step"
    errors = errors_of("codec_jax.planning", source, is_package=True)
    assert errors == ["codec_jax.planning:2: floor 1 may not import codec_jax.decode (floor 4)"]


def test_unknown_module_says_where_to_add_it() -> None:
    assert errors_of("codec_jax.helpers", "") == [
        "codec_jax.helpers has no floor: add it to FLOORS in tests/test_floors.py"
    ]
