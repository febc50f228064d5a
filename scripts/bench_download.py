"""Measure the downloader on loopback: against curl and hf, its memory, and what several connections gain.

Run by scripts/bench_download. A server in a process of its own answers as the Hub does (facts in headers, a redirect to
a second host name, ranges) and sends with sendfile, so that it is not what is measured. The programs take turns; shown
are ratios of medians.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from bench_overhead import DOCUMENT, Row, report, write_table

REPO = Path(__file__).parent.parent
BEGIN, END = "<!-- scripts/bench_download --write: begin -->", "<!-- scripts/bench_download --write: end -->"
BIN = Path(sys.executable).parent
COMMIT = "0" * 40
MIB = 2**20
ROUNDS = 5
SIZE, CAPPED_SIZE = 1024 * MIB, 256 * MIB
CAP = 50_000_000
VS_CURL, VS_HF, RSS_MB, GAIN = 2.0, 1.0, 80.0, 3.0
"""Limits; GAIN is how many times as fast several connections must be, shown as the share of time."""

PULL = """
import json, sys, time
from pathlib import Path
from looprun_models import download, transfer
from looprun_models.registry import resolve_alias
from looprun_models.settings import load_settings
transfer.CONNECTIONS = int(sys.argv[2])
settings = load_settings()
spec = resolve_alias(sys.argv[1], settings)
started = time.perf_counter()
download.pull(spec, settings, spec.default_path(settings), on_progress=lambda _: None)
took = time.perf_counter() - started
status = Path("/proc/self/status")
peak = 0
if status.exists():
    peak = int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
print(json.dumps([took, peak]))
"""

PROFILE = """
alias = "bench"
note = "made up"
file = "{file}"
default_dir = "{folder}"
env_var = "BENCH_GGUF"
hf_repo = "bench/bench"
approx_size_gb = 1
kv = "f16"
ctx = 4096
cache_ram_mib = 384
served_id = "bench"
"""


class Taken(NamedTuple):
    """One run: wall seconds of the whole program, seconds of the transfer alone, peak bytes of memory."""

    whole: float
    transfer: float = 0.0
    peak: int = 0


class Handler(BaseHTTPRequestHandler):
    """As the Hub answers: the same path on 127.0.0.1 redirects to localhost, where the bytes are."""

    protocol_version = "HTTP/1.1"
    file: Path
    etag: str
    cap: int

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        host, _, port = self.headers.get("Host", "").rpartition(":")
        size = self.file.stat().st_size
        if self.path.startswith("/api/"):
            self.send_response(404)
            self.send_header("Content-Length", "0")
        elif host != "localhost":
            self.send_response(302)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Etag", f'"{self.etag}"')
            self.send_header("X-Linked-Size", str(size))
            self.send_header("ETag", f'"{self.etag}"')
            self.send_header("Location", f"http://localhost:{port}{self.path}")
            self.send_header("Content-Length", "0")
        else:
            self._bytes(size)
            return
        self.end_headers()

    def _bytes(self, size: int) -> None:
        start, end = 0, size
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) + 1 if last else size
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{self.etag}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            self._send(start, end)

    def _send(self, start: int, end: int) -> None:
        began, at = time.monotonic(), start
        block = 4 * MIB if not self.cap else MIB // 2
        with self.file.open("rb") as file, contextlib.suppress(ConnectionError):
            while at < end:
                at += os.sendfile(self.connection.fileno(), file.fileno(), at, min(block, end - at))
                if self.cap:
                    time.sleep(max(0.0, began + (at - start) / self.cap - time.monotonic()))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that needs no more closes its connection."""


def serve(file: Path, etag: str, cap: int) -> None:
    """The server program: prints its port, ends with its standard input."""
    Handler.file, Handler.etag, Handler.cap = file, etag, cap
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
    server.shutdown()


@contextlib.contextmanager
def served(file: Path, etag: str, cap: int = 0) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", str(file), etag, str(cap)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"update the table in {DOCUMENT.relative_to(REPO)}")
    parser.add_argument("--serve", nargs=3, metavar=("FILE", "ETAG", "CAP"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(Path(args.serve[0]), args.serve[1], int(args.serve[2]))
        return 0
    cache = REPO / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-download-", dir=cache) as folder:
        rows = [*speed_rows(Path(folder)), *capped_rows(Path(folder))]
    text = report(rows)
    print(text)
    if args.write:
        write_table(BEGIN, END, text)
    return 0 if all(row.ok for row in rows) else 1


def make(path: Path, size: int) -> str:
    """A file that begins like a GGUF and repeats itself nowhere; its sha256."""
    block, digest = random.Random(1).randbytes(MIB - 8), hashlib.sha256()
    with path.open("wb") as file:
        for number in range(size // MIB):
            words = (b"GGUF" if number == 0 else number.to_bytes(4, "big")) + number.to_bytes(4, "big")
            digest.update(words + block)
            file.write(words + block)
    return digest.hexdigest()


def environment(folder: Path, url: str, file: str) -> dict[str, str]:
    profiles = folder / "home" / ".config" / "looprun" / "profiles"
    profiles.mkdir(parents=True, exist_ok=True)
    text = PROFILE.format(file=file, folder=folder / "ours")
    (profiles / "bench.toml").write_text(text, encoding="utf-8")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    home = folder / "home"
    return kept | {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*",
    }


def ran(command: list[str], environ: Mapping[str, str], folder: Path) -> Taken:
    """Time one program in fresh folders. Dirty pages of the one before are written first, in nobody's time."""
    for name in ("ours", "theirs", "curl"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    if hasattr(os, "sync"):
        os.sync()
    started = time.perf_counter()
    done = subprocess.run(command, env=environ, cwd=folder, check=True, capture_output=True, text=True)
    whole = time.perf_counter() - started
    if command[1:2] == ["-c"]:
        took, peak = (float(word) for word in done.stdout.strip(" []\n").split(","))
        return Taken(whole, took, int(peak))
    return Taken(whole)


def pull_command(connections: int = 4) -> list[str]:
    return [sys.executable, "-c", PULL, "bench", str(connections)]


def speed_rows(folder: Path) -> list[Row]:
    file = folder / "big.gguf"
    sha256 = make(file, SIZE)
    with served(file, sha256) as url:
        environ = environment(folder, url, file.name)
        address = f"{url}/bench/bench/resolve/main/{file.name}"
        hf = [str(BIN / "hf"), "download", "bench/bench", file.name, "--local-dir", str(folder / "theirs")]
        commands = {
            "curl": ["curl", "-sSfL", "-o", str(folder / "curl" / file.name), address],
            "hf": hf,
            "pull": pull_command(),
        }
        taken: dict[str, list[Taken]] = {name: [] for name in commands}
        for number in range(ROUNDS + 1):  # the first round warms the caches and does not count
            for name, command in commands.items():
                one = ran(command, environ, folder)
                if number:
                    taken[name].append(one)
    file.unlink()
    curl = statistics.median(each.whole for each in taken["curl"])
    theirs = statistics.median(each.whole for each in taken["hf"])
    whole = statistics.median(each.whole for each in taken["pull"])
    alone = statistics.median(each.transfer for each in taken["pull"])
    peak = max(each.peak for each in taken["pull"]) / 1e6
    rate = 8 * SIZE / alone / 1e9
    return [
        Row(
            "verified pull of 1 GiB, time beside `curl -o`",
            alone / curl,
            VS_CURL,
            "x",
            f"{alone:.2f} s ({rate:.1f} Gbit/s), curl {curl:.2f} s",
        ),
        Row(
            "the same, whole programs, beside `hf download`",
            whole / theirs,
            VS_HF,
            "x",
            f"{whole:.2f} s, hf {theirs:.2f} s",
        ),
        Row("memory of the pull, peak resident", peak, RSS_MB, " MB", f"largest of {ROUNDS} runs"),
    ]


def capped_rows(folder: Path) -> list[Row]:
    file = folder / "capped.gguf"
    sha256 = make(file, CAPPED_SIZE)
    with served(file, sha256, CAP) as url:
        environ = environment(folder, url, file.name)
        one = ran(pull_command(1), environ, folder).transfer
        four = statistics.median(ran(pull_command(), environ, folder).transfer for _ in range(3))
    detail = f"{four:.2f} s with four, {one:.2f} s with one: {one / four:.1f} times as fast, at least {GAIN:g} wanted"
    return [Row("256 MiB at 50 MB/s a connection, four beside one", four / one, round(1 / GAIN, 2), "x", detail)]


if __name__ == "__main__":
    sys.exit(main())
