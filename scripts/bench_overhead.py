"""Measure what the manager adds: command starts, the wait for readiness, attaching, and the supervisor's memory.

Run by scripts/bench_overhead in an environment with an ordinary install. Command starts are ratios of medians, the
commands taking turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

REPO = Path(__file__).parent.parent
DOCUMENT = REPO / "docs" / "benchmarks.md"
BEGIN, END = "<!-- scripts/bench_overhead --write: begin -->", "<!-- scripts/bench_overhead --write: end -->"
BIN = Path(sys.executable).parent

ROUNDS = 15
STARTS = 10
ATTACHES = 21
RATIO_HELP, RATIO_STATUS, RATIO_IMPORT = 0.35, 0.6, 2.0
READY_MS, ATTACH_MS, SUPERVISOR_MB = 100, 30, 20

PROFILE = """
alias = "tiny"
note = "a model of a few MB"
file = "{file}"
default_dir = "{folder}"
env_var = "TINY_GGUF"
hf_repo = "nobody/tiny"
approx_size_gb = 0.003
kv = "f16"
ctx = 4096
cache_ram_mib = 384
served_id = "tiny-gguf"
"""

START = """
import sys, time
from looprun_models import local_model
model = local_model("tiny", port=int(sys.argv[1]), keep_alive=0)
returned = time.monotonic()
print(returned, model.server.record.supervisor_pid, flush=True)
sys.stdin.read()
model.close()
"""

POLL = """
import http.client, sys, time
while True:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=5)
    try:
        connection.request("GET", "/health")
        if connection.getresponse().status == 200:
            break
    except OSError:
        pass
    finally:
        connection.close()
    time.sleep(0.003)
print(time.monotonic())
"""

ATTACH = """
import sys, time
from looprun_models import local_model
started = time.perf_counter()
model = local_model("tiny", port=int(sys.argv[1]), keep_alive=0)
model.chat.completions.create
print(1000 * (time.perf_counter() - started))
assert model.server.already_running
model.close()
"""


class Row(NamedTuple):
    """One line of the table. value is compared with limit in the same unit; detail says what was seen."""

    what: str
    value: float
    limit: float
    unit: str
    detail: str

    @property
    def ok(self) -> bool:
        return self.value <= self.limit


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a small GGUF to serve")
    parser.add_argument("--write", action="store_true", help=f"update the table in {DOCUMENT.relative_to(REPO)}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="looprun-bench-") as home:
        environ = clean_environment(Path(home), args.model.absolute())
        rows = [*command_rows(environ), *server_rows(environ)]
    text = report(rows)
    print(text)
    if args.write:
        write_table(BEGIN, END, text)
    return 0 if all(row.ok for row in rows) else 1


def clean_environment(home: Path, model: Path) -> dict[str, str]:
    """An empty home with one profile; no variable of ours, and no check for updates in the command compared with."""
    profiles = home / "config" / "looprun" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "tiny.toml").write_text(PROFILE.format(file=model.name, folder=model.parent), encoding="utf-8")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return kept | {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "LOOPRUN_STATE_DIR": str(home / "state"),
        "LOOPRUN_CACHE_DIR": str(home / "cache"),
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def command_rows(environ: Mapping[str, str]) -> list[Row]:
    python, looprun, hf = sys.executable, str(BIN / "looprun"), str(BIN / "hf")
    took = interleaved(
        {
            "pass": [python, "-c", "pass"],
            "import": [python, "-c", "import looprun_models"],
            "help": [looprun, "--help"],
            "status": [looprun, "models", "status"],
            "hf": [hf, "--help"],
        },
        environ,
    )

    def row(what: str, mine: str, other: str, other_name: str, limit: float) -> Row:
        detail = f"{1000 * took[mine]:.0f} ms, `{other_name}` {1000 * took[other]:.0f} ms"
        return Row(what, took[mine] / took[other], limit, "x", detail)

    return [
        row("`looprun --help`", "help", "hf", "hf --help", RATIO_HELP),
        row("`looprun models status`, nothing running", "status", "hf", "hf --help", RATIO_STATUS),
        row("`python -c 'import looprun_models'`", "import", "pass", "python -c pass", RATIO_IMPORT),
    ]


def interleaved(commands: Mapping[str, list[str]], environ: Mapping[str, str]) -> dict[str, float]:
    """Median seconds of each, the commands taking turns; a first round warms the caches and does not count."""
    took: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(ROUNDS + 1):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(
                command,
                env=environ,
                cwd=environ["HOME"],
                check=True,
                stdout=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
            )
            if number:
                took[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in took.items()}


def server_rows(environ: Mapping[str, str]) -> list[Row]:
    late, memory = [], []
    for _ in range(STARTS):
        port = free_port()
        poller = python(POLL, port, environ)
        with started_model(port, environ) as (returned, supervisor):
            late.append(1000 * (returned - float(poller.communicate()[0])))
            memory.append(psutil.Process(supervisor).memory_info().rss / 1e6)
    port = free_port()
    with started_model(port, environ):
        attached = [float(python(ATTACH, port, environ).communicate()[0]) for _ in range(ATTACHES)]
    return [
        Row(
            f"start: `local_model` returns after another process sees it ready, worst of {STARTS}",
            max(late),
            READY_MS,
            " ms",
            f"median {statistics.median(late):.0f} ms",
        ),
        Row(
            f"attach to a running server, up to `.chat.completions`, median of {ATTACHES} processes",
            statistics.median(attached),
            ATTACH_MS,
            " ms",
            f"from {min(attached):.0f} to {max(attached):.0f} ms",
        ),
        Row(
            "supervisor, resident memory, largest",
            max(memory),
            SUPERVISOR_MB,
            " MB",
            f"median {statistics.median(memory):.1f} MB",
        ),
    ]


@contextlib.contextmanager
def started_model(port: int, environ: Mapping[str, str]) -> Iterator[tuple[float, int]]:
    """A process that started a server: when `local_model` returned (monotonic seconds), and the supervisor's pid."""
    holder = python(START, port, environ)
    assert holder.stdout is not None
    returned, supervisor = holder.stdout.readline().split()
    try:
        yield float(returned), int(supervisor)
    finally:
        holder.communicate()
        with contextlib.suppress(psutil.Error):
            psutil.Process(int(supervisor)).wait(20)


def python(program: str, port: int, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a program of above, away from the repo: `-c` would import the package from there."""
    return subprocess.Popen(
        [sys.executable, "-c", program, str(port)],
        env=environ,
        cwd=environ["HOME"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: Any = probe.getsockname()[1]
        return int(port)


def report(rows: list[Row]) -> str:
    lines = [f"Measured {datetime.date.today().isoformat()} on {machine()}.", ""]
    lines += ["| what | measured | limit | | in detail |", "|---|---:|---:|---|---|"]
    for row in rows:
        digits = 2 if row.unit == "x" else 1
        value, verdict = f"{row.value:.{digits}f}{row.unit}", "ok" if row.ok else "over"
        lines.append(f"| {row.what} | {value} | {row.limit:g}{row.unit} | {verdict} | {row.detail} |")
    return "\n".join(lines)


def machine() -> str:
    """What the numbers depend on; nothing that names this very machine."""
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux") if sys.platform == "linux" else sys.platform
    cpu = ""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        cpu = f", {found[1].strip()}" if found else ""
    ram = psutil.virtual_memory().total / 1e9
    return (
        f"{os.cpu_count()} cores ({platform.machine()}{cpu}), {ram:.0f} GB of memory, {system}, "
        f"Python {platform.python_version()}"
    )


def write_table(begin: str, end: str, text: str) -> None:
    """Replace what stands between two marker lines of the document."""
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{DOCUMENT} lacks the two marker lines")
    DOCUMENT.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
