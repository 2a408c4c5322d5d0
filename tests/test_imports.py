"""The arrows between modules, and what importing the package costs and starts."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import adafactor

PACKAGE = Path(adafactor.__file__).parent

# What each module may import of the package: only what stands above it here, or in its own line.
ORDER = [
    ["shapes", "sharding", "models"],
    ["checks"],
    ["rule", "rounding"],
    ["sweeps"],
    ["reference"],
    ["backends.kernel", "backends.strides"],
    ["backends.cpu", "backends.foreach"],
    ["backends"],
    ["layouts", "exchange"],
    ["state"],
    ["meeting", "parts"],
    ["batching", "saving"],
    ["program"],
    ["readings"],
    ["optimizer"],
    [
        "dialects",
        "dialects.big_vision",
        "dialects.optax",
        "dialects.paper",
        "dialects.timm",
        "dialects.torch",
        "dialects.transformers",
    ],
    ["dialects.towhee"],
    ["adafactor", "memory", "bill", "presets"],
]
LIBRARY = {name: level for level, names in enumerate(ORDER) for name in names}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "adafactor"


def imports(path: Path) -> set[str]:
    """The modules of the package, and others by their first name, that a file imports anywhere in it."""
    package = path.relative_to(PACKAGE).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for name in node.names:
                inside = Path(*base, name.name) if base else Path(name.name)
                is_module = node.level and any((PACKAGE / inside).with_suffix(s).exists() for s in ("", ".py"))
                target = ".".join([*base, name.name] if is_module else base)
                found.add(f"adafactor.{target}" if node.level else target)
    return {name.removeprefix("adafactor.") if name.startswith("adafactor.") else name for name in found}


FILES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("module", sorted(LIBRARY))
def test_arrows_point_downward(module):
    """A backend that knew the optimizer could not be replaced; shapes that knew torch could not be used without."""
    inside = {name for name in imports(FILES[module]) if name in FILES}
    for name in inside - {module}:
        assert name in LIBRARY, f"{module} imports {name}, which is no part of the library"
        assert LIBRARY[name] <= LIBRARY[module], f"{module} imports {name} from above"


def test_every_module_has_its_place():
    applications = ("training", "cli", "__main__")
    assert {name for name in FILES if name.split(".")[0] not in applications} == set(LIBRARY)


def test_shapes_needs_no_torch():
    assert "torch" not in {name.split(".")[0] for name in imports(FILES["shapes"])}


def test_the_library_needs_torch_alone():
    for module in LIBRARY:
        outside = {name.split(".")[0] for name in imports(FILES[module]) if name not in FILES}
        assert outside <= {"torch", *sys.stdlib_module_names}, module


def test_training_needs_no_command_line():
    for module, path in FILES.items():
        if module.startswith("training"):
            inside = {name for name in imports(path) if name in FILES}
            assert not {name for name in inside if name.split(".")[0] in ("cli", "__main__")}, module


def run(code: str, **variables: str) -> str:
    environment = os.environ | variables
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    ).stdout


def test_importing_starts_nothing():
    """No compiler, no distributed, no CUDA context: a laptop and a login node must not pay for what they do not use."""
    code = (
        "import sys, torch; before = set(sys.modules); import adafactor;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)), torch.cuda.is_initialized())"
    )
    assert run(code).strip() == "['adafactor'] False"


def test_importing_is_quick_beyond_torch(tmp_path):
    """Under 20 ms of the processor's time, the best of a few tries: a busy machine only ever adds.

    The first one compiles, as an install does.
    """
    code = "import torch, time; start = time.process_time(); import adafactor; print(time.process_time() - start)"
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(float(run(code, **compiled)) for _ in range(4)) < 0.020
