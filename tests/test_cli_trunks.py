"""`looprun trunks list | show | bake | rm | clean`: what is said of saved prompts, what is removed, what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from looprun_models.cli import app
from typer.testing import CliRunner, Result

from looprun_models import obsolete
from looprun_models.engine import Engine, identity_of
from looprun_models.provenance import weights_identity
from looprun_models.records import list_servers
from looprun_models.search import find_engine
from looprun_models.settings import load_settings
from looprun_models.trunkentry import Entry, Proof, encoded
from looprun_models.trunkfiles import temporary_name
from looprun_models.trunkmisses import Misses
from looprun_models.trunkstore import TrunkStore
from tests.helpers import labelled
from tests.test_trunkstore import STATE, meta, save

Profile = Callable[..., str]
CONTROL = re.compile(r"[^\n -~]")
HOUR = 3600.0
SYSTEM = {"role": "system", "content": "You plan trains. " + "Be brief and exact. " * 8}


def run(*words: str, **options: Any) -> Result:
    return CliRunner(charset=options.pop("charset", "utf-8")).invoke(app.app, words, prog_name="looprun", **options)


def failed(done: Result, code: int) -> str:
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert (done.stderr.count("error: "), done.stderr.count("  next: ")) == (1, 1), done.stderr
    return str(done.stderr)


@pytest.fixture
def store() -> TrunkStore:
    return TrunkStore(load_settings().slots_dir)


@pytest.fixture
def engine() -> Engine:
    return find_engine(load_settings())


@pytest.fixture
def usable(profile: Profile, tiny_gguf: Callable[[str], Path], engine: Engine) -> dict[str, str]:
    """The facts of a trunk that the engine and the profile of this home can use."""
    profile()
    weights = weights_identity(tiny_gguf("tiny-qwen35-mtp"), load_settings())
    return {"engine": engine.identity, "weights": weights, "flags": "-ctk q8_0", "tokens": "d" * 64}


def keep(
    store: TrunkStore,
    name: str,
    ago: float = 0.0,
    used: float | None = None,
    proof: Proof | None = None,
    **changed: Any,
) -> Entry:
    """A trunk that was baked and last used so many hours ago."""
    entry = save(store, meta(name, **changed))
    entry = dataclasses.replace(entry, created=time.time() - ago * HOUR, proof=proof)
    sidecar = store.folder / f"{entry.key}.json"
    sidecar.write_bytes(encoded(entry))
    moment = round((time.time() - (ago if used is None else used) * HOUR) * 1e9)
    os.utime(sidecar, ns=(moment, moment))
    return entry


def columns(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def row_of(done: Result, label: str) -> list[str]:
    assert done.exit_code == 0, done.output
    rows = [columns(line) for line in done.stdout.splitlines()]
    return next(row for row in rows if row[0] == label)


# --- list ---


def test_a_home_without_trunks_is_looked_at_and_left_as_it_is(store: TrunkStore) -> None:
    done = run("trunks", "list")
    assert done.exit_code == 0
    assert done.stdout.startswith("in all   no trunks, 0 B of at most ")
    assert "next: looprun trunks bake ALIAS LABEL FILE" in done.stderr
    assert not store.folder.exists()


def test_list_has_a_row_for_each_trunk_and_the_sum(store: TrunkStore) -> None:
    keep(store, "scheduler", ago=50, used=2.5, proof=Proof(4312, 4391, time.time() - 2.5 * HOUR), tokens=4391)
    keep(store, "poet", ago=0.5)
    done = run("trunks", "list")
    assert columns(done.stdout.splitlines()[0]) == ["label", "alias", "tokens", "size", "age", "used", "last proof"]
    proved = ["scheduler", "ram16", "4391", "16.4 kB", "2 d", "2 h ago", "4312 of 4391 reused, 2 h ago"]
    assert row_of(done, "scheduler") == proved
    assert row_of(done, "poet") == ["poet", "ram16", "2193", "16.4 kB", "30 min", "30 min ago", "not proved yet"]
    assert [columns(line)[0] for line in done.stdout.splitlines()[1:3]] == ["poet", "scheduler"]
    assert re.search(rf"^in all   2 trunks, 34\.\d kB of at most \d\.\d GB, in {store.folder}$", done.stdout, re.M)


def test_list_says_the_budget_that_was_set(store: TrunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPRUN_TRUNK_BUDGET", "0.25")
    assert "0 B of at most 250.0 MB" in run("trunks", "list").stdout


def test_list_marks_all_but_the_newest_of_a_label(store: TrunkStore) -> None:
    keep(store, "first", ago=3, label="scheduler")
    keep(store, "second", ago=2, label="scheduler")
    keep(store, "third", ago=4, label="scheduler", alias="other")
    keep(store, "fourth", ago=1, label="Scheduler")
    keep(store, "fifth", ago=5, label="scheduler", facts={"engine": "another, in turn with the first"})
    ages = {tuple(columns(line)[i] for i in (0, 1, 4)) for line in run("trunks", "list").stdout.splitlines()[1:6]}
    assert ages == {
        ("scheduler", "ram16", "5 h"),
        ("scheduler", "ram16", "3 h, older"),
        ("scheduler", "ram16", "2 h"),
        ("scheduler", "other", "4 h"),
        ("Scheduler", "ram16", "1 h"),
    }


def test_list_of_one_profile_takes_its_short_name_and_one_that_is_no_more(store: TrunkStore) -> None:
    keep(store, "a", alias="qwen3.6-35b-ram16")
    keep(store, "b", alias="removed-since")
    assert [columns(line)[0] for line in run("trunks", "list", "ram16").stdout.splitlines()[1:2]] == ["a"]
    done = run("trunks", "list", "removed-since")
    assert row_of(done, "b")
    assert "\na " not in done.stdout
    assert "in all   2 trunks" in done.stdout
    assert "unknown model alias 'ram61'" in failed(run("trunks", "list", "ram61"), 2)


def test_list_json_is_data_only(store: TrunkStore) -> None:
    entry = keep(store, "ü\x1b", ago=1, proof=Proof(3, 4, 5.0), read_seconds=9.5)
    keep(store, "newer", label="ü\x1b")
    done = run("trunks", "list", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["folder"], told["total"]) == (str(store.folder), store.total())
    assert told["budget"] == pytest.approx(store.limit(), rel=0.01)
    older = next(trunk for trunk in told["trunks"] if trunk["key"] == entry.key)
    assert {name: older[name] for name in ("label", "alias", "tokens", "size", "older", "read_seconds")} == {
        "label": "ü\x1b",
        "alias": "ram16",
        "tokens": 2193,
        "size": len(STATE),
        "older": True,
        "read_seconds": 9.5,
    }
    assert (older["proof"], older["file"]) == ({"reused": 3, "tokens": 4, "at": 5.0}, str(store.folder / entry.file))
    assert [trunk["older"] for trunk in told["trunks"]] == [False, True]


@pytest.mark.parametrize("command", ["list", "show", "clean"])
def test_a_folder_that_cannot_be_read_is_named(command: str, store: TrunkStore) -> None:
    store.folder.parent.mkdir(parents=True, exist_ok=True)
    store.folder.write_bytes(b"")
    done = run("trunks", command, *(["x"] if command == "show" else []))
    assert done.exit_code == (2 if command == "show" else 0), done.output
    assert f"{store.folder}, which cannot be read: Not a directory" in done.stderr
    assert "chmod" not in done.stderr


def test_list_warns_of_a_folder_that_others_can_enter(store: TrunkStore) -> None:
    keep(store, "a")
    store.folder.chmod(0o755)
    assert "other users can look into" in run("trunks", "list").stderr


def test_with_saving_turned_off_the_trunks_of_before_are_shown(
    store: TrunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, "a")
    monkeypatch.setenv("LLAMA_SLOT_SAVE_PATH", "")
    done = run("trunks", "list")
    assert row_of(done, "a")
    assert "LLAMA_SLOT_SAVE_PATH is empty" in done.stderr


def test_labels_do_a_terminal_no_harm(store: TrunkStore) -> None:
    evil = "\x1b]0;x\x07\x1b[2J\r\n\u202e\udcff\u2028é"
    keep(
        store,
        evil,
        alias="\x1b[31m",
        engine="\x9b0m",
        facts={"engine": "\x1b[1m/e:1", "flags": "-c\r8", "\x1b[5m": "\n"},
    )
    keep(store, "blank", label=" ")
    keep(store, "long", label="x" * 300)
    shown = r"\x1b]0;x\x07\x1b[2J\r\n\u202e\udcff\u2028" + "é"
    listed = run("trunks", "list")
    assert row_of(listed, shown)[1] == r"\x1b[31m"
    assert row_of(listed, '" "')
    assert row_of(listed, "x" * 45 + "...")
    for done in (listed, run("trunks", "show", evil), run("trunks", "show", shown), run("trunks", "rm", shown)):
        assert shown in done.output
        assert set(CONTROL.findall(done.output)) <= {"é"}
    assert shown.replace("é", r"\xe9") in run("trunks", "list", charset="ascii").stdout
    assert f"{'x' * 300} (ram16)" in run("trunks", "show", "x" * 300).stdout
    assert run("trunks", "rm", shown, "--yes").exit_code == 0
    assert {entry.meta.label for entry in store.entries()} == {" ", "x" * 300}


# --- show ---


def test_show_tells_everything(store: TrunkStore, usable: dict[str, str], engine: Engine) -> None:
    proof = Proof(2193, 2193, time.time() - 2.5 * HOUR)
    entry = keep(
        store, "scheduler", ago=3, used=0.1, proof=proof, engine="b11549", facts=usable, alias="tiny-qwen35-mtp"
    )
    done = run("trunks", "show", "scheduler")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "scheduler (tiny-qwen35-mtp)",
        "  tokens     2193",
        "  read cold  9.4 s, when it was baked",
        "  size       16.4 kB",
        "  baked      3 h ago, last used 6 min ago",
        "  proof      2193 of 2193 reused, 2 h ago",
        "  usable     yes, with the engine, weights and flags below",
        f"  engine     b11549, {engine.identity}",
        f"  weights    {usable['weights']}",
        "  flags      -ctk q8_0",
        f"  key        {entry.key}",
        f"  file       {store.folder / entry.file}",
    ]


def test_show_says_what_was_never_seen(store: TrunkStore) -> None:
    keep(store, "scheduler", read_seconds=None, facts={"files": "/a/b.gguf:7", "key": "x"})
    told = run("trunks", "show", "scheduler").stdout
    assert "read cold  not known" in told
    assert "  files      /a/b.gguf:7\n" in told
    assert f"  key        {meta('scheduler').key}\n" in told
    assert "proof      not proved yet" in told
    assert "weights    not known" in told


def test_show_has_the_newest_first_and_tells_profiles_apart(store: TrunkStore) -> None:
    keep(store, "old", ago=9, label="a")
    keep(store, "new", ago=8, label="a")
    keep(store, "else", ago=1, label="a", alias="other")
    heads = [line for line in run("trunks", "show", "a").stdout.splitlines() if not line.startswith(" ")]
    assert heads == ["a (other)", "a (ram16)", "a (ram16), an older version"]
    told = json.loads(run("trunks", "show", "a", "other", "--json").stdout)
    assert [trunk["alias"] for trunk in told["trunks"]] == ["other"]


def test_a_label_that_is_not_there_is_a_usage_error(store: TrunkStore) -> None:
    keep(store, "here")
    told = failed(run("trunks", "show", "Here"), 2)
    assert f"there is no trunk Here in {store.folder}." in told
    assert "looprun trunks list" in told
    assert "unknown model alias 'other'" in failed(run("trunks", "rm", "here", "other", "--yes"), 2)
    assert "there is no trunk here of smoke in" in failed(run("trunks", "rm", "here", "smoke", "--yes"), 2)


def test_a_trunk_of_another_engine_is_called_unusable(
    store: TrunkStore, usable: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    program.write_bytes(b"one")
    keep(store, "a", facts={**usable, "engine": str(identity_of(program))})
    assert "usable     yes" in run("trunks", "show", "a").stdout
    program.write_bytes(b"another")
    assert f"usable     no: its engine has changed since: {program}" in run("trunks", "show", "a").stdout
    program.unlink()
    assert f"usable     no: its engine is gone: {program}" in run("trunks", "show", "a").stdout
    assert json.loads(run("trunks", "show", "a", "--json").stdout)["trunks"][0]["unusable"].startswith("its engine is")


# --- rm ---


def test_rm_asks_first(store: TrunkStore) -> None:
    keep(store, "a")
    told = failed(run("trunks", "rm", "a"), 1)
    assert "Remove the trunk a of ram16 (16.4 kB)?" in told
    assert "next: looprun trunks rm a ram16 --yes" in told
    assert store.entries()


def test_rm_takes_every_version_and_nothing_else(store: TrunkStore) -> None:
    keep(store, "one", ago=2, label="a")
    keep(store, "two", ago=1, label="a")
    keep(store, "A")
    kept = keep(store, "a/b")
    assert "the trunk a of ram16 in 2 versions (32.8 kB)" in run("trunks", "rm", "a").stderr
    before = store.total()
    done = run("trunks", "rm", "a", "--yes")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{(before - store.total()) / 1000:.1f} kB freed\n"
    assert {entry.meta.label for entry in store.entries()} == {"A", "a/b"}
    assert store.check(kept.key)[0]


def test_rm_of_a_label_that_several_profiles_use_names_them(store: TrunkStore) -> None:
    keep(store, "one", label="my label")
    keep(store, "two", label="my label", alias="other")
    told = failed(run("trunks", "rm", "my label", "--yes"), 2)
    assert "my label is a trunk of other and of ram16." in told
    assert "next: looprun trunks rm 'my label' other" in told
    assert len(store.entries()) == 2
    assert run("trunks", "rm", "my label", "other", "--yes").exit_code == 0
    assert [entry.meta.alias for entry in store.entries()] == ["ram16"]


def test_what_cannot_be_removed_is_an_error(store: TrunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(store, "a")
    monkeypatch.setattr(TrunkStore, "drop", lambda self, key: 0)  # a read-only folder, which root can write
    assert f"1 of 1 trunks could not be removed from {store.folder}" in failed(run("trunks", "rm", "a", "--yes"), 1)


# --- clean ---


def test_clean_takes_what_nothing_can_use_and_says_why(store: TrunkStore, usable: dict[str, str]) -> None:
    keep(store, "old", ago=9, label="scheduler", facts=usable)
    keep(store, "new", ago=8, label="scheduler", facts=usable)
    keep(store, "reverted", ago=9, used=1, label="scheduler", facts=usable)  # an older one that is in use again
    keep(store, "moved", facts={**usable, "engine": "/nowhere/llama-server:0123"})
    keep(store, "dropped", facts={**usable, "weights": "sha256:00"})
    keep(store, "half")
    (store.folder / labelled(store, "ram16", "half")[0].file).unlink()
    (store.folder / re.sub(r"\.\d+-", ".1-", temporary_name("e" * 64))).write_bytes(b"x" * 5000)
    mine = store.folder / temporary_name("f" * 64)
    mine.write_bytes(b"a save that goes on")
    (store.folder / "notes.txt").write_bytes(b"somebody's")
    half = (store.folder / f"{meta('half').key}.json").stat().st_size
    told = failed(run("trunks", "clean"), 1)
    assert "scheduler of ram16, 16.4 kB: not used since a newer one was baked\n" in told
    assert "moved of ram16, 16.4 kB: its engine is gone: /nowhere/llama-server\n" in told
    assert "dropped of ram16, 16.4 kB: no profile finds its weights now" in told
    assert f"Remove 3 trunks (49.2 kB) and what interrupted saves left ({(5000 + half) / 1000:.1f} kB)?" in told
    assert "next: looprun trunks clean --yes" in told
    assert len(store.entries()) == 5

    before = store.total()
    done = run("trunks", "clean", "--yes")
    assert (done.exit_code, done.stdout) == (0, f"{(before - store.total()) / 1000:.1f} kB freed\n"), done.output
    assert {entry.key for entry in store.entries()} == {meta("new").key, meta("reverted").key}
    kept = {path.name for path in store.folder.iterdir() if not path.name.endswith((".trunk", ".json", ".lock"))}
    assert kept == {mine.name, "notes.txt"}
    assert f"nothing to clean in {store.folder}." in run("trunks", "clean").stderr


def test_weights_that_cannot_be_read_are_not_taken_for_gone(
    store: TrunkStore, usable: dict[str, str], tmp_path: Path, profile: Profile
) -> None:
    keep(store, "a", facts={**usable, "weights": "sha256:00"})
    profile(alias="odd", file="odd.gguf", default_dir=str(tmp_path))
    (tmp_path / "odd.gguf").symlink_to("odd.gguf")
    assert "nothing to clean" in run("trunks", "clean").stderr


def test_what_a_running_server_uses_is_not_taken_for_gone(
    store: TrunkStore, usable: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "no-longer-in-a-profile.gguf"
    model.write_bytes(b"GGUF")
    engine = "/upgraded/since/llama-server:0123"
    running = SimpleNamespace(engine_identity=engine, model_path=str(model))
    keep(store, "a", facts={**usable, "engine": engine, "weights": weights_identity(model, load_settings())})
    assert "its engine is gone" in run("trunks", "clean").stderr
    monkeypatch.setattr(obsolete, "list_servers", lambda settings: [running])
    assert "nothing to clean" in run("trunks", "clean").stderr


def test_clean_tries_restoring_again(store: TrunkStore, usable: dict[str, str]) -> None:
    misses = Misses(load_settings().cache_dir)
    misses.note_miss("/a/llama-server:0123", "qwen35")
    told = "forgotten: that restoring trunks did not help (/a/llama-server, qwen35); it is tried again\n"
    keep(store, "gone", facts={**usable, "weights": "sha256:00"})
    assert "forgotten" not in failed(run("trunks", "clean"), 1)
    assert misses.count("/a/llama-server:0123", "qwen35") == 1
    assert told in run("trunks", "clean", "--yes").stderr
    assert misses.count("/a/llama-server:0123", "qwen35") == 0
    misses.note_miss("/a/llama-server:0123", "qwen35")
    assert told in run("trunks", "clean").stderr  # nothing is removed: there is nothing to ask
    assert "forgotten" not in run("trunks", "clean").stderr


def test_clean_all_takes_every_trunk(store: TrunkStore, usable: dict[str, str]) -> None:
    keep(store, "a", facts=usable)
    keep(store, "b", facts={**usable, "flags": "others"})
    assert "nothing to clean" in run("trunks", "clean", "--yes").stderr
    keep(store, "c", facts={**usable, "weights": "sha256:00"})
    told = failed(run("trunks", "clean", "--all"), 1)
    assert "Remove 3 trunks (49.2 kB)?" in told
    assert "no profile finds" not in told  # all go, for whatever reason
    assert "next: looprun trunks clean --all --yes" in told
    assert run("trunks", "clean", "--all", "--yes").exit_code == 0
    assert (store.entries(), store.total()) == ([], 0)


def test_disk_counts_them_and_says_where_to_look(store: TrunkStore) -> None:
    keep(store, "a")
    assert f"{store.total() / 1000:.1f} kB trunk states (looprun trunks list)" in run("models", "disk").stdout


# --- bake ---

SOUND = [{"role": "system", "content": "x"}]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (b'{"messages": [\n  {"role": system}]}', "line 2, column 12: Expecting value"),
        (b"", "it is empty"),
        (b"[\xff]", "byte 1 is not UTF-8"),
        (b"[" * 100_000, "its lists are nested too deeply"),
        (b"[NaN]", "NaN is no JSON"),
        ("x", "the file: expected an object or a list of messages, found a text"),
        ({"tools": []}, "the file: expected messages, and there are none"),
        ({"messages": SOUND, "model": "x"}, "expected messages, tools and template_args, found the key 'model'"),
        ({"messages": "hello"}, "messages: expected a list of messages, found a text"),
        ([], "messages: expected at least one message"),
        ([*SOUND, "hello"], 'messages[1]: expected an object with "role" and "content", found a text'),
        ([{"content": "x"}], 'messages[0].role: expected a text such as "system", found nothing'),
        ([{"role": "system", "content": 7}], "messages[0].content: expected a text or a list of parts, found a number"),
        ([{"role": "system"}], "messages[0].content: expected a text or a list of parts, found nothing"),
        ({"messages": SOUND, "tools": {}}, "tools: expected a list of tools, found an object"),
        ({"messages": SOUND, "tools": [{"name": "f"}]}, "tools[0].function: expected an object"),
        ({"messages": SOUND, "tools": [{"function": {}}]}, "tools[0].function.name: expected a text, found nothing"),
        ({"messages": SOUND, "template_args": [True]}, "template_args: expected an object, found a list"),
    ],
)
def test_bake_refuses_what_is_no_prompt_and_says_where(
    written: object, told: str, tmp_path: Path, profile: Profile
) -> None:
    alias = profile()
    file = tmp_path / "prompt.json"
    file.write_bytes(written if isinstance(written, bytes) else json.dumps(written).encode())
    said = failed(run("trunks", "bake", alias, "x", str(file)), 2)
    assert f"error: {file}: {told}" in said
    assert '{"messages": [{"role": "system", "content": "..."}]' in said
    assert f"error: standard input: {told}" in failed(
        run("trunks", "bake", alias, "x", "-", input=file.read_bytes()), 2
    )
    assert not list_servers(load_settings())


@pytest.mark.parametrize(
    ("name", "why"), [("absent.json", "No such file"), ("", "Is a directory"), ("a\0b", "null"), ("\x1b", "No such")]
)
def test_bake_names_a_file_that_cannot_be_read(name: str, why: str, tmp_path: Path, profile: Profile) -> None:
    said = failed(run("trunks", "bake", profile(), "x", f"{tmp_path}/{name}"), 2)
    assert "cannot be read: " in said
    assert why in said
    assert not CONTROL.search(said)


def test_bake_reads_once_and_restores_from_then_on(profile: Profile, tmp_path: Path, store: TrunkStore) -> None:
    alias = profile()
    file = tmp_path / "prompt.json"
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({"messages": [SYSTEM], "tools": [weather]}).encode())
    done = run("trunks", "bake", alias, "planner", str(file))
    assert done.exit_code == 0, done.output
    baked = re.fullmatch(r"baked, (\d+) tokens in \d+\.\d\d s, (\d+\.\d kB)\n", done.stdout)
    assert baked, done.stdout
    assert "it stays loaded" not in done.stderr
    assert row_of(run("trunks", "list", alias), "planner")[:4] == ["planner", alias, *baked.groups()]
    assert "usable     yes" in run("trunks", "show", "planner").stdout

    again = run("trunks", "bake", alias, "planner", "-", input=file.read_bytes())
    assert again.stdout.startswith(f"restored, {baked[1]} tokens in "), again.output
    other = run("trunks", "bake", alias, "dispatcher", str(file))
    told = "this very prompt was saved before under another label, and keeps it: looprun trunks show planner\n"
    assert told in other.stderr
    assert told not in again.stderr
    assert "a prompt that was saved before keeps its first label" in failed(run("trunks", "show", "dispatcher"), 2)
    assert len(store.entries()) == 1

    (store.folder / store.entries()[0].file).write_bytes(bytes(store.entries()[0].size))
    mended = run("trunks", "bake", alias, "planner", str(file))
    assert mended.stdout.startswith(f"baked, {baked[1]} tokens in "), mended.output
    assert "note: the saved state was not used and is gone: its bytes are not those that were saved" in mended.stderr

    less = run("trunks", "bake", alias, "planner", "-", input=json.dumps([SYSTEM]).encode())
    count = re.match(r"baked, (\d+) tokens", less.stdout)
    assert count, less.output
    assert int(count[1]) < int(baked[1])  # the tools were in the other
    assert "planner of tiny-qwen35-mtp" in run("trunks", "clean").stderr


def test_bake_shares_a_server_and_says_how_long_it_stays(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPRUN_KEEP_ALIVE", "90")
    alias = profile()
    try:
        first = run("trunks", "bake", alias, "planner", "-", input=json.dumps([SYSTEM]).encode())
        assert f"[it stays loaded for 90 s: looprun models stop {alias}]" in first.stderr, first.output
        second = run("trunks", "bake", alias, "planner", "-", input=json.dumps([SYSTEM]).encode())
        assert second.stdout.startswith("warm, "), second.output
        assert "it stays loaded" not in second.stderr
        assert len(list_servers(load_settings())) == 1
    finally:
        run("models", "stop", "--all", "--force")


def test_bake_that_could_not_save_is_exit_1(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPRUN_TRUNK_BUDGET", "0")
    done = run("trunks", "bake", profile(), "planner", "-", input=json.dumps([SYSTEM]).encode())
    told = failed(done, 1)
    assert re.search(r"error: planner: cold, \d+ tokens in .* s, not saved: LOOPRUN_TRUNK_BUDGET is 0", told), told


def test_bake_of_messages_that_share_nothing_is_refused(profile: Profile) -> None:
    told = run("trunks", "bake", profile(), "x", "-", input=json.dumps([{"role": "nobody", "content": "x"}]).encode())
    assert (told.exit_code, told.stdout) == (2, ""), told.output
