"""Who may import whom, who may read the environment or start programs, and what is loaded when.

The rule is design section 2, with the modules it does not name: `system` (the platform halves under one name, standard
library only) and `progress` stand at the left, `fit` before launch, `failure` before servers.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parent.parent
PACKAGE = REPO / "looprun_models"
ORDER = (
    ("_version", "profiles", "errors", "progress", "settings", "_posix", "_windows", "system"),
    ("registry", "machine", "ggufformat", "gguf"),
    ("receipts", "paths", "journal", "weights", "hub", "source", "spans", "transfer", "download"),
    ("probe", "engine", "verdicts", "search", "variants", "releases", "unpack", "staging"),
    ("fit", "request", "launch"),
    ("wire", "failure", "records", "lease", "servers", "smoke", "install", "removal"),
    ("adoption", "storage"),
    ("runtime", "runtimes.external", "runtimes.mlx", "runtimes.vllm", "runtimes"),
    ("trunkfiles", "trunkentry", "trunkmisses", "trunkstore"),
    ("provenance", "slot", "prefix", "reply", "ledger", "trunks", "obsolete", "measure"),
    ("resident", "client", "testing"),
    ("cli",),
)
"""Left to right. A module imports only from groups to its left and, within its group, from those before it."""
PROGRAMS = {"supervisor": {"wire", "system"}, "embedded": set[str]()}
"""Run with `python -m`, imported by nobody; what each may import of ours."""
DEBTS: dict[str, str] = {}
"""Breaches that are known; the test fails when one is mended and still listed."""
PLACE = {name: (column, row) for column, group in enumerate(ORDER) for row, name in enumerate(group)}
SURFACE = "__init__"
READS_THE_ENVIRONMENT = {
    "settings",
    "embedded",  # a program in llama-server's place, which reads the key as that does
}
STARTS_PROGRAMS = {"probe", "servers", "supervisor", "_posix", "_windows"}
HEAVY = ("openai", "httpx", "httpx2", "huggingface_hub", "rich", "typer", "psutil", "pydantic", "numpy", "xllamacpp")


def sources() -> dict[str, Path]:
    """Every module of the package by its name in it; those of cli/ as "cli.models"."""
    found = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    found |= {f"cli.{path.stem}": path for path in (REPO / "cli").glob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


SOURCES = sources()
LIBRARY = {name for name in SOURCES if not name.startswith("cli.") and name != "cli"}


def place_of(name: str) -> tuple[int, int]:
    return PLACE["cli"] if name == "cli" or name.startswith("cli.") else PLACE[name]


def imports_of(name: str, path: Path) -> Iterator[str]:
    """The modules of ours that a file imports anywhere in it, functions and TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from filter(None, (ours(alias.name) for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = f"looprun_models.{name}".rsplit(".", node.level)[0]
                module = f"{package}.{module}".rstrip(".")
            inside = filter(None, (ours(f"{module}.{alias.name}") for alias in node.names))
            yield from [target for target in inside if target in SOURCES] or filter(None, [ours(module)])


def ours(module: str) -> str | None:
    """ "looprun_models.wire" -> "wire"; None for what is not ours."""
    parts = module.split(".")
    if parts[0] in ("cli", "profiles", "tests"):
        return module  # never by these names: a second copy of the module is not the same module
    return ".".join(parts[1:]) if parts[0] == "looprun_models" and parts[1:] else None


def test_every_module_has_its_place() -> None:
    unplaced = LIBRARY - set(PLACE) - set(PROGRAMS) - {SURFACE}
    assert not unplaced, "give them a place in ORDER (and in the design)"


def with_debts(name: str) -> Any:
    marks = [pytest.mark.xfail(strict=True, reason=DEBTS[name])] if name in DEBTS else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [with_debts(name) for name in sorted(set(SOURCES) - set(PROGRAMS) - {SURFACE})])
def test_imports_go_from_right_to_left_only(name: str) -> None:
    column, row = place_of(name)
    for target in imports_of(name, SOURCES[name]):
        assert target not in PROGRAMS, f"{target} is a program: run it with python -m"
        if name.startswith("cli") and target.startswith("cli."):
            continue
        assert place_of(target) < (column, row), f"{name} must not import {target}, which stands to its right"


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_need_little_of_ours(name: str) -> None:
    assert set(imports_of(name, SOURCES[name])) <= PROGRAMS[name]


def test_the_surface_loads_lazily() -> None:
    statements = ast.parse(SOURCES[SURFACE].read_text(encoding="utf-8")).body
    assert not [node for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]


def test_the_rule_sees_each_form_of_import(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "import looprun_models.wire\nfrom looprun_models import weights as w\nfrom looprun_models.fit import Fit\n"
        "def f():\n    from looprun_models.client import x\n    from . import engine\n    from ..launch import y\n"
        "import os, json\nfrom cli import app\n"
    )
    found = set(imports_of("runtimes.external", path))
    assert found == {"wire", "weights", "fit", "client", "launch", "runtimes", "cli.app"}


@pytest.mark.parametrize("name", sorted(set(SOURCES) - READS_THE_ENVIRONMENT))
def test_only_settings_reads_the_environment(name: str) -> None:
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    words = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in words, f"{name}:{node.lineno} reads os.{node.attr}: take it from Settings"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not words & {alias.name for alias in node.names}, f"{name}:{node.lineno}"


def test_only_a_few_modules_start_programs() -> None:
    starting = set()
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                named = [node.module or ""]
            if "subprocess" in named or "multiprocessing" in named:
                starting.add(name)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert not node.attr.startswith(("spawn", "popen", "system", "exec", "posix_spawn")), name
    assert starting == STARTS_PROGRAMS


def loaded_after(code: str, *flags: str) -> set[str]:
    """The modules in a fresh interpreter after this code."""
    script = f"import sys\n{code}\nmodules = sorted(sys.modules)\nimport json\nprint('\\n' + json.dumps(modules))"
    done = subprocess.run([sys.executable, *flags, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing() -> None:
    loaded = loaded_after("import looprun_models")
    assert not loaded & set(HEAVY)
    assert {name for name in loaded if name.startswith("looprun_models")} == {"looprun_models"}


def test_every_public_name_is_there() -> None:
    loaded = loaded_after(
        "import looprun_models as m\nassert [getattr(m, n) for n in m.__all__]\nassert set(m.__all__) <= set(dir(m))"
    )
    assert "looprun_models.client" in loaded


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import looprun_models

    with pytest.raises(AttributeError, match="has no attribute 'local_modell'"):
        looprun_models.local_modell  # noqa: B018


@pytest.mark.parametrize(
    "words", [["--help"], ["models", "list"], ["models", "status", "--json"], ["trunks", "list"], ["trunks", "clean"]]
)
def test_commands_that_look_load_no_client_and_no_download(words: list[str]) -> None:
    loaded = loaded_after(
        f"sys.argv = ['looprun', *{words!r}]\nfrom looprun_models.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert "looprun_models.cli.app" in loaded
    assert not loaded & {"openai", "huggingface_hub", "httpx", "httpx2", "rich.progress", "xllamacpp", "numpy"}


def test_the_supervisor_stays_small() -> None:
    loaded = loaded_after(f"sys.path.insert(0, {str(REPO)!r})\nimport looprun_models.supervisor", "-IS")
    heavy = {"typing", "dataclasses", "pathlib", "inspect", "asyncio", "urllib.request", "platformdirs", "psutil"}
    assert not loaded & (heavy | set(HEAVY))
