"""`looprun models verify | adopt | disk | rm`, and what `init` and `status` say of weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from looprun_models.cli import app
from typer.testing import CliRunner, Result

from looprun_models import journal
from looprun_models import weights as weights_module
from looprun_models.errors import WeightsBad
from looprun_models.receipts import write_receipt
from looprun_models.registry import resolve_alias
from looprun_models.runtime import LlamaCppRuntime
from tests.test_adoption import Stores

Profile = Callable[..., str]


def run(*words: str) -> Result:
    return CliRunner().invoke(app.app, words, prog_name="looprun")


def failed(done: Result, code: int) -> str:
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert done.stderr.count("error: ") == 1, done.stderr
    assert done.stderr.count("  next: ") == 1, done.stderr
    return str(done.stderr)


@pytest.fixture
def stores(home: Path, tiny_gguf: Callable[[str], Path]) -> Stores:
    return Stores(home, tiny_gguf("tiny-qwen35-mtp").read_bytes())


@pytest.fixture
def absent(profile: Profile, tmp_path: Path, stores: Stores) -> str:
    return profile(default_dir=str(tmp_path / "own"), size_bytes=len(stores.raw), sha256=stores.digest)


@pytest.fixture
def present(absent: str, tmp_path: Path, stores: Stores) -> Path:
    """The file of the profile `absent`, which is there now."""
    path = tmp_path / "own" / "tiny-qwen35-mtp.gguf"
    path.parent.mkdir()
    path.write_bytes(stores.raw)
    return path


# --- verify ---


def test_verify_prints_the_sha256_and_against_what_it_was_held(absent: str, present: Path, stores: Stores) -> None:
    done = run("models", "verify", absent)
    assert (done.exit_code, done.stdout) == (0, f"{stores.digest}  {present}\n"), done.output
    assert "is whole: the sha256 is that of the profile's pin." in done.stderr


def test_verify_with_nothing_to_compare_says_so(
    profile: Profile, tmp_path: Path, tiny_gguf: Callable[..., Path]
) -> None:
    alias = profile()
    done = run("models", "verify", alias)
    digest = hashlib.sha256(tiny_gguf("tiny-qwen35-mtp").read_bytes()).hexdigest()
    assert (done.exit_code, done.stdout.split()[0]) == (0, digest)
    assert "nothing to compare with" in done.stderr
    assert "is whole" not in done.stderr


def test_verify_of_damaged_bytes_is_exit_4_and_names_the_way_out(absent: str, present: Path, stores: Stores) -> None:
    raw = bytearray(stores.raw)
    raw[-1] ^= 1
    present.write_bytes(raw)
    told = failed(run("models", "verify", absent), 4)
    assert "is damaged: the profile's pin says sha256" in told
    assert f"looprun models rm {absent}, then: looprun models pull {absent}" in told


def test_verify_of_a_receipt_that_does_not_fit(profile: Profile, tmp_path: Path, stores: Stores) -> None:
    path = tmp_path / "own" / "tiny-qwen35-mtp.gguf"
    path.parent.mkdir()
    path.write_bytes(stores.raw)
    write_receipt(path, repo="", revision="", size=len(stores.raw), sha256="e" * 64)
    assert "the receipt of 20" in failed(run("models", "verify", profile(default_dir=str(path.parent))), 4)


def test_verify_of_missing_weights(absent: str) -> None:
    assert f"looprun models pull {absent}" in failed(run("models", "verify", absent), 4)


# --- adopt ---


def test_adopt_shows_what_it_saves_and_prints_the_path(absent: str, stores: Stores) -> None:
    path = stores.hf()
    done = run("models", "adopt", absent, "--yes")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"found    {path} (Hugging Face cache, 2.3 MB): its name is the sha256 of the profile's pin",
        f"saves    a download of 2.3 MB, and as much disk, for {absent}",
        str(path),
    ]
    assert f"{absent} now uses it; its sha256 is that of the profile's pin." in done.stderr
    assert f"next: looprun models serve {absent}" in done.stderr
    again = run("models", "adopt", absent)
    assert (again.exit_code, again.stdout) == (0, f"{path}\n")


def test_adopt_without_a_terminal_changes_nothing(absent: str, stores: Stores) -> None:
    stores.hf()
    done = run("models", "adopt", absent)
    assert done.exit_code == 1
    assert "nothing was adopted" in done.stderr
    assert f"next: looprun models adopt {absent} --yes" in done.stderr
    assert run("models", "status", absent, "--check").exit_code == 4


def test_adopt_says_when_nothing_proves_it(profile: Profile, tmp_path: Path, stores: Stores) -> None:
    stores.lm_studio()
    alias = profile(default_dir=str(tmp_path / "own"))
    done = run("models", "adopt", alias, "--link", "--yes")
    assert done.exit_code == 0, done.output
    assert "no sha256 to compare with" in done.stdout
    assert f"nothing tells the sha256 that {alias} should have; this one has {stores.digest}" in done.stderr
    assert (tmp_path / "own" / "tiny-qwen35-mtp.gguf").stat().st_nlink == 2


def test_adopt_from_a_place(absent: str, stores: Stores) -> None:
    path = stores.plain("stick", "x.gguf")
    done = run("models", "adopt", absent, "--from", str(path.parent), "--yes")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, str(path)), done.output
    run("models", "rm", absent, "--yes")
    assert "/no/such/place is not there" in failed(run("models", "adopt", absent, "--from", "/no/such/place"), 2)


def test_adopt_where_nothing_fits(absent: str) -> None:
    told = failed(run("models", "adopt", absent), 4)
    assert "in the caches of Hugging Face, llama.cpp, LM Studio and Ollama" in told
    assert f"next: looprun models pull {absent}, or look elsewhere: looprun models adopt {absent} --from FOLDER" in told


def test_init_names_adoption_instead_of_a_download(absent: str, stores: Stores) -> None:
    path = stores.ollama()
    done = run("init", "--local", absent)
    assert done.exit_code == 0, done.output
    assert f"found    {path} (Ollama, 2.3 MB): its name is the sha256 of the profile's pin" in done.stdout
    assert f"saves    a download of 2.3 MB, and as much disk, for {absent}" in done.stdout
    assert (
        f"next: looprun models adopt {absent}   (or fetch it all the same: looprun models pull {absent})" in done.stdout
    )
    assert "Fetch " not in done.stderr


def test_pull_does_not_write_among_another_tools_files(
    absent: str, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stores.lm_studio()
    run("models", "adopt", absent, "--yes")
    path.write_bytes(b"<html>")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    told = failed(run("models", "pull", absent, "--yes"), 4)
    assert f"next: looprun models rm {absent}   (forgets that path), then: looprun models pull {absent}" in told
    with pytest.raises(WeightsBad):
        LlamaCppRuntime().ensure_model(resolve_alias(absent), download=True)
    assert path.read_bytes() == b"<html>"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


# --- disk and rm ---


def test_disk_tells_what_is_shared_and_what_rm_frees(absent: str, present: Path, profile: Profile) -> None:
    profile(alias="twin", default_dir=str(present.parent))
    done = run("models", "disk")
    assert done.exit_code == 0, done.output
    row = next(line for line in done.stdout.splitlines() if line.startswith(absent))
    assert row.split()[:6] == [absent, "ok", "2.3", "MB", "-", "-"]
    assert row.endswith("the same file as twin")
    assert "in all   2.3 MB weights (a shared file counted once)" in done.stdout


def test_disk_json_is_data_only(absent: str, present: Path) -> None:
    done = run("models", "disk", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    share = next(share for share in told["profiles"] if share["alias"] == absent)
    assert share["weights"] == share["frees"] == told["weights"] == present.stat().st_size


def test_rm_asks_and_names_who_else_uses_the_file(absent: str, present: Path, profile: Profile) -> None:
    profile(alias="twin", default_dir=str(present.parent))
    done = run("models", "rm", absent)
    assert done.exit_code == 1
    assert f"Remove {present} (2.3 MB)? twin uses the same file." in done.stderr
    assert f"next: looprun models rm {absent} --yes" in done.stderr
    assert present.exists()
    done = run("models", "rm", absent, "--yes")
    assert (done.exit_code, done.stdout) == (0, "2.3 MB freed\n"), done.output
    assert not present.exists()


def test_rm_of_nothing_is_no_error(absent: str) -> None:
    for words in ((), ("--partial",)):
        done = run("models", "rm", absent, *words)
        assert (done.exit_code, done.stdout) == (0, ""), done.output
        assert "nothing to remove" in done.stderr


def test_rm_of_an_adopted_file_says_that_it_stays(absent: str, stores: Stores) -> None:
    path = stores.lm_studio()
    run("models", "adopt", absent, "--yes")
    done = run("models", "rm", absent)
    assert f"Stop using {path} for {absent}? The file stays" in done.stderr
    assert run("models", "rm", absent, "--yes").stdout == "0 B freed\n"
    assert path.exists()


def test_rm_refuses_before_it_asks(absent: str, present: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_GGUF", str(present))
    told = failed(run("models", "rm", absent), 2)
    assert "is left alone: TINY_GGUF names it" in told
    assert "Remove" not in told


@pytest.mark.engine
def test_rm_refuses_while_it_is_served(absent: str, present: Path) -> None:
    with LlamaCppRuntime().ensure_server(resolve_alias(absent)):
        told = failed(run("models", "rm", absent), 1)
        assert "Remove" not in told, "nobody is asked for what cannot be done"
        assert f"is in use: the server of {absent} (pid " in told
        assert f"next: looprun models stop {absent}" in told
    assert present.exists()


def test_a_partial_download_is_shown_and_can_be_dropped(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    part.write_bytes(bytes(2000))
    monkeypatch.setattr(weights_module, "read_progress", lambda _: (200, 1000) if part.exists() else None)
    monkeypatch.setattr(journal, "part_files", lambda target: [part] if target.name.startswith("tiny") else [])

    def drop(_: Path) -> bool:
        part.unlink(missing_ok=True)
        return True

    monkeypatch.setattr(journal, "drop", drop)
    one, table = run("models", "status", absent).stdout, run("models", "status").stdout
    assert "  weights  partial (20 %)  " in one
    assert f"next: looprun models pull {absent}   (goes on where it stopped)" in one
    assert "partial (20 %)" in table
    assert "2.0 kB" in run("models", "disk").stdout
    asked = run("models", "rm", absent, "--partial").stderr
    assert "Remove the partial download of tiny-qwen35-mtp.gguf (2.0 kB)?" in asked
    assert f"looprun models rm {absent} --partial --yes" in asked
    assert run("models", "rm", absent, "--partial", "--yes").stdout == "2.0 kB freed\n"
    assert not part.exists()


def test_a_file_of_ten_bytes_is_bad_and_both_ways_out_are_named(absent: str, tmp_path: Path) -> None:
    path = tmp_path / "own" / "tiny-qwen35-mtp.gguf"
    path.parent.mkdir()
    path.write_bytes(b"0123456789")
    told = run("models", "status", absent).stdout
    assert f"  weights  bad      {path}: " in told
    assert f"looprun models pull {absent}" in told
    assert f"looprun models rm {absent}" in told
    assert run("models", "rm", absent, "--yes").stdout == "10 B freed\n"


def test_a_broken_paths_toml_is_one_message(absent: str, home: Path) -> None:
    path = home / ".config" / "looprun" / "paths.toml"
    path.write_text("x =")
    assert str(path) in failed(run("models", "status", absent), 2)
    assert str(path) in failed(run("models", "list"), 2)
