"""What people install: the wheel, built from the sdist, holds one package and runs where the repo is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

from looprun_models import __version__

REPO = Path(__file__).parent.parent
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
SCRIPTS = "Scripts" if sys.platform == "win32" else "bin"


def test_the_wheel_of_the_sdist_is_complete_and_runs_outside_the_repo(tmp_path: Path, home: Path) -> None:
    wheel = build(tmp_path)
    check_contents(wheel)
    programs = install(wheel, tmp_path)
    listed = run(programs / "looprun", "models", "list", cwd=tmp_path)
    assert listed.splitlines()[0].split()[:3] == ["alias", "short", "download"]
    for alias in ("qwen3.5-4b", "qwen3.5-4b-ram8", "qwen3.6-35b-ram16", "qwen3.6-35b-ram24", "smollm2-135m"):
        assert alias in listed
    status = json.loads(run(programs / "looprun", "models", "status", "--json", cwd=tmp_path))
    assert status["chosen"] == "qwen3.6-35b-ram24"
    assert {model["model_file"]["state"] for model in status["models"]} == {"missing"}
    assert run(programs / "looprun", "--version", cwd=tmp_path).strip() == f"looprun-models {__version__}"
    where = "import looprun_models.cli, looprun_models.profiles as p; print(looprun_models.cli.__file__, *p.__path__)"
    for path in run(programs / "python", "-c", where, cwd=tmp_path).split():
        assert Path(path).is_relative_to(tmp_path / "venv")


def build(tmp_path: Path) -> Path:
    """The wheel; made from a copy, so that nothing stale in the working tree gets in and nothing is left there."""
    source, out = tmp_path / "source", tmp_path / "dist"
    shutil.copytree(REPO, source, ignore=NOT_SOURCE)
    run(Path(sys.executable), "-m", "build", "--no-isolation", "--outdir", str(out), str(source), cwd=tmp_path)
    (wheel,) = out.glob("*.whl")
    assert wheel.name == f"looprun_models-{__version__}-py3-none-any.whl"
    assert (out / f"looprun_models-{__version__}.tar.gz").exists()
    return wheel


def check_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"looprun_models", f"looprun_models-{__version__}.dist-info"}
    inside = {name.removeprefix("looprun_models/") for name in names if name.startswith("looprun_models/")}
    expected = {"py.typed", "smoke.gguf"}
    for folder, name in ((REPO / "looprun_models", ""), (REPO / "cli", "cli/"), (REPO / "profiles", "profiles/")):
        found = [path for kind in ("*.py", "*.toml") for path in folder.rglob(kind)]
        expected |= {name + path.relative_to(folder).as_posix() for path in found}
    assert inside - {"profiles/README.md"} == expected
    assert len([name for name in inside if name.endswith(".toml")]) >= 6
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def install(wheel: Path, tmp_path: Path) -> Path:
    """Its folder of programs. Installed without a network; the dependencies are those of the running interpreter."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / SCRIPTS / "python"
    pip = ("-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--no-deps", "--no-index")
    run(Path(sys.executable), *pip, str(wheel), cwd=tmp_path)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", ask, cwd=tmp_path).strip())
    # A folder that a .pth names is searched, but the .pth files in it (the editable install) are not obeyed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python.parent


def run(program: Path, *words: str, cwd: Path) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(program), *words], cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
