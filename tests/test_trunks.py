"""Trunks as an agent's program sees them, on the embedded engine: what it is told, and what may go wrong without harm.

What every engine must do alike is in real/test_trunks.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from looprun_models import ContextOverflow, LocalModel, ServerUnavailable, Trunk, async_local_model, local_model, warmth
from looprun_models import resident as resident_module
from looprun_models.errors import UsageError
from looprun_models.lease import stop_server
from looprun_models.ledger import open_ledger
from looprun_models.records import list_servers
from looprun_models.reply import Warmth, counted
from looprun_models.runtimes.external import ExternalRuntime
from looprun_models.settings import load_settings
from looprun_models.slot import Slot, SlotRefused
from looprun_models.testing import LoopbackServer, Reply
from looprun_models.trunkstore import TrunkStore
from looprun_models.wire import Record
from tests.helpers import free_port, gone, labelled, wait_for
from tests.test_trunkstore import may_mount

Profile = Callable[..., str]
REPO = Path(__file__).parent.parent
STATE = "tiny-qwen35-mtp-state"
HELLO = {"role": "user", "content": "Hello?"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("first", "second")
]


def rules(name: str, lines: int = 6) -> list[dict[str, str]]:
    told = " ".join(f"{number}. {name} counts boats and ferries." for number in range(lines))
    return [{"role": "system", "content": f"{name} rules. {told}"}]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def say(trunk: Trunk, *messages: Any, max_tokens: int = 12, **options: Any) -> Any:
    return trunk.create(messages=messages, temperature=0, max_tokens=max_tokens, **options)


def text(reply: Any) -> str:
    message = reply.choices[0].message
    return f"{getattr(message, 'reasoning_content', None) or ''}|{message.content or ''}"


def uncached(model: LocalModel, *messages: Any, max_tokens: int = 12, **options: Any) -> str:
    reply = model.chat.completions.create(
        model=model.model,
        messages=messages,
        temperature=0,
        max_tokens=max_tokens,
        extra_body={"cache_prompt": False},
        **options,
    )
    assert reply.timings["cache_n"] == 0
    return text(reply)


def record_of(model: Any) -> Record:
    record: Record = model.server.record
    return record


def store_of(model: Any) -> TrunkStore:
    return TrunkStore(Path(record_of(model).slot_dir or ""))


def kill(model: Any) -> None:
    record = record_of(model)
    os.kill(record.child_pid, signal.SIGKILL)
    wait_for(lambda: gone(record.child_pid) and gone(record.supervisor_pid), "the server is gone")


def forget(model: Any) -> None:
    """As if the server had lost all that it had seen."""
    with open_ledger(record_of(model), load_settings()) as ledger:
        ledger.slot, ledger.cached = None, []


def parts_of(store: TrunkStore) -> list[Path]:
    return list(store.folder.glob("*.part"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, probed_engine: Path) -> Iterator[Path]:
    """State and cache of the server that these tests share; it is stopped at the end."""
    folder = tmp_path_factory.mktemp("trunks")
    shutil.copytree(probed_engine, folder / "cache")
    yield folder
    settings = load_settings({"LOOPRUN_STATE_DIR": str(folder / "state"), "PATH": os.environ["PATH"]})
    for record in list_servers(settings):
        stop_server(record, force=True)


@pytest.fixture
def model(folders: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalModel]:
    """On a server that stays for the next test, with trunks of its own: the store and what was learned are empty."""
    monkeypatch.setenv("LOOPRUN_STATE_DIR", str(folders / "state"))
    monkeypatch.setenv("LOOPRUN_CACHE_DIR", str(folders / "cache"))
    with local_model(profile(STATE, port=free_port()), keep_alive=600) as model:
        for file in store_of(model).folder.iterdir():
            file.unlink()
        (folders / "cache" / "trunk-misses.json").unlink(missing_ok=True)
        forget(model)
        yield model


@pytest.fixture
def alias(profile: Profile) -> str:
    """One whose server ends with the test."""
    return profile(STATE)


# --- what is told ----------------------------------------------------------------------------------------------------


def test_the_states_of_a_trunk(model: LocalModel) -> None:
    baked = model.trunk("Ada", messages=rules("Ada"))
    assert (baked.state, baked.note) == ("baked", "")
    assert baked.tokens > 200
    assert baked.bytes == sum(entry.size for entry in store_of(model).entries()) > 10_000
    assert baked.seconds > 0
    assert repr(baked).startswith(f"<trunk 'Ada': baked, {baked.tokens} tokens, ")
    assert model.trunk("Ada", messages=rules("Ada")).state == "warm"
    forget(model)
    restored = model.trunk("Ada", messages=rules("Ada"))
    assert (restored.state, restored.tokens, restored.bytes) == ("restored", baked.tokens, baked.bytes)


def test_warmth_of_replies(model: LocalModel) -> None:
    trunk = model.trunk("Ida", messages=rules("Ida"))
    reply = say(trunk, HELLO)
    found = warmth(reply)
    assert found.reused >= trunk.tokens == found.trunk
    assert found.prompt == found.reused + found.read == reply.usage.prompt_tokens
    assert (found.state, found.drift, found.note, found.written) == ("warm", None, "", 12)
    assert found.ttft is not None
    assert found.cold_estimate is not None
    assert found.cold_estimate > 0
    assert text(reply) == uncached(model, *rules("Ida"), HELLO)


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}], ids=["plain", "usage"])
def test_warmth_of_a_stream(model: LocalModel, options: dict[str, Any]) -> None:
    trunk = model.trunk("Ada", messages=rules("Ada"))
    stream = say(trunk, HELLO, stream=True, **options)
    with pytest.raises(UsageError, match="no token counts"):
        warmth(stream)
    assert isinstance(stream, openai.Stream)
    assert len(list(stream)) > 5
    found = warmth(stream)
    assert (found.trunk, found.state, found.written) == (trunk.tokens, "warm", 12)
    assert found.reused >= trunk.tokens
    assert found.ttft is not None


def test_a_stream_that_is_closed_early_costs_nothing(model: LocalModel) -> None:
    told = uncached(model, *rules("Ada"), HELLO)
    trunk = model.trunk("Ada", messages=rules("Ada"))
    model.trunk("Bob", messages=rules("Bob"))
    with say(trunk, HELLO, stream=True, max_tokens=2000) as stream:
        next(iter(stream))
    with pytest.raises(UsageError):
        warmth(stream)
    reply = say(trunk, HELLO)
    assert text(reply) == told
    assert warmth(reply).reused >= trunk.tokens - 4
    assert warmth(reply).note == ""


def test_a_plain_reply_has_its_warmth_too(model: LocalModel) -> None:
    trunk = model.trunk("Ada", messages=rules("Ada"))
    reply = model.chat.completions.create(
        model=model.model,
        messages=[*rules("Ada"), HELLO],  # type: ignore[list-item]
        max_tokens=2,
    )
    assert warmth(reply).reused >= trunk.tokens
    assert (warmth(reply).trunk, warmth(reply).cold_estimate) == (None, None)


def test_messages_may_be_those_after_the_trunk_or_the_whole_chat(model: LocalModel) -> None:
    trunk = model.trunk("Ada", messages=rules("Ada"))
    after, whole = say(trunk, HELLO), say(trunk, *rules("Ada"), HELLO)
    assert text(after) == text(whole)
    assert warmth(whole).drift is None
    then = say(trunk, HELLO, after.choices[0].message, user("And then?"))
    assert warmth(then).drift is None
    assert warmth(then).reused >= trunk.tokens
    examples = [user("Name one."), {"role": "assistant", "content": "Ada"}]
    unruled = model.trunk("examples", messages=examples)
    assert text(say(unruled, HELLO)) == text(say(unruled, *examples, HELLO))


def test_tools_are_the_trunks_unless_others_are_given(model: LocalModel) -> None:
    trunk = model.trunk("Ada", messages=rules("Ada"), tools=TOOLS)
    bare = model.trunk("Ada", messages=rules("Ada"))
    assert trunk.tokens > bare.tokens + 100
    for same in ({}, {"tools": None}, {"tools": openai.NOT_GIVEN}, {"tools": TOOLS}):
        assert warmth(say(trunk, HELLO, **same)).drift is None, same
        assert warmth(say(trunk, HELLO, **same)).reused >= trunk.tokens
    none = warmth(say(trunk, HELLO, tools=[]))
    assert none.drift
    assert none.drift.what == "tool 0 (first) is missing and"
    assert warmth(say(trunk, HELLO)).reused >= trunk.tokens, "and that is no one's fault"


def test_drift_names_the_first_message_and_character(model: LocalModel) -> None:
    trunk = model.trunk("clock", messages=[{"role": "system", "content": f"Now: 10:00. {rules('Ada')[0]['content']}"}])
    late = say(trunk, {"role": "system", "content": f"Now: 10:07. {rules('Ada')[0]['content']}"}, HELLO)
    drift = warmth(late).drift
    assert drift
    assert (drift.what, drift.character) == ("message 0 (system)", 9)
    assert str(warmth(late)).count("message 0 (system) differs from the trunk at character 9: '7. Ada") == 1
    turned = model.trunk("tools", messages=rules("Ada"), tools=TOOLS)
    drift = warmth(say(turned, HELLO, tools=TOOLS[::-1])).drift
    assert drift
    assert drift.what == "tool 0 (second)"
    told = warmth(say(turned, HELLO))
    assert (told.drift, told.note) == (None, "")


def test_copies_of_the_client_have_trunks(model: LocalModel) -> None:
    trunk = model.with_options(timeout=60).trunk("Ada", messages=rules("Ada"))
    assert warmth(say(trunk, HELLO)).reused >= trunk.tokens


def test_template_arguments_belong_to_the_trunk(model: LocalModel) -> None:
    args = {"enable_thinking": False}
    told = uncached_with(model, args)
    trunk = model.trunk("Ada", messages=rules("Ada"), template_args=args)
    assert text(say(trunk, HELLO)) == told
    thinking = say(trunk, HELLO, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert text(thinking) != told
    assert warmth(thinking).drift is None
    assert text(trunk.create(messages=[HELLO], **model.pinned(max_tokens=12))) == told


def uncached_with(model: LocalModel, template_args: dict[str, Any]) -> str:
    body = {"cache_prompt": False, "chat_template_kwargs": template_args}
    messages: Any = [*rules("Ada"), HELLO]
    return text(
        model.chat.completions.create(
            model=model.model, messages=messages, temperature=0, max_tokens=12, extra_body=body
        )
    )


def test_threads_with_agents_of_their_own(model: LocalModel) -> None:
    names = ("Ada", "Bob", "Cyd", "Dan")
    told = {name: uncached(model, *rules(name), HELLO) for name in names}
    wrong: list[Any] = []

    def run(name: str) -> None:
        trunk = model.trunk(name, messages=rules(name))
        for _ in range(4):
            reply = say(trunk, HELLO)
            if text(reply) != told[name] or "not taken up" in warmth(reply).note:
                wrong.append((name, text(reply), warmth(reply)))

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_errors_of_the_call_are_its_own(model: LocalModel) -> None:
    trunk = model.trunk("Ada", messages=rules("Ada"))
    with pytest.raises(openai.BadRequestError):
        say(trunk, HELLO, n=2)  # more than the server has slots
    with pytest.raises(ContextOverflow):
        say(trunk, user("x" * 9000))
    with pytest.raises(ContextOverflow) as caught:
        model.trunk("long", messages=[{"role": "system", "content": "x" * 9000}])
    assert (caught.value.context, caught.value.prompt_tokens > 9000) == (4096, True)
    assert warmth(say(trunk, HELLO)).reused >= trunk.tokens - 4


# --- proof -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def useless(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Make replies say that nothing was reused, as where a restore changes nothing."""

    def nothing_reused(reply: Any) -> Warmth | None:
        found = counted(reply)
        return found and dataclasses.replace(found, reused=0)

    return lambda on: monkeypatch.setattr(resident_module, "counted", nothing_reused if on else counted)


def test_two_restores_that_change_nothing_end_restoring_until_the_engine_changes(
    model: LocalModel, useless: Callable[[bool], None]
) -> None:
    trunk = model.trunk("Ada", messages=rules("Ada"))
    useless(True)
    forget(model)
    first = warmth(say(trunk, HELLO))
    assert first.state == "restored"
    assert first.note.startswith(f"the restored trunk was not taken up: 0 of its {trunk.tokens} tokens were reused (b")
    assert "qwen35" in first.note
    [entry] = store_of(model).entries()
    assert entry.proof
    assert entry.proof.reused == 0
    forget(model)
    second = warmth(say(trunk, HELLO))
    assert second.note.endswith("trunks are read cold from now on")
    useless(False)
    forget(model)
    third = model.trunk("Ada", messages=rules("Ada"))
    assert third.state == "cold"
    assert "restoring did not help on b" in third.note
    assert warmth(say(third, HELLO)).reused >= third.tokens
    model.server.record.engine_identity += "-new"  # type: ignore[attr-defined]
    forget(model)
    assert model.trunk("Ada", messages=rules("Ada")).state == "baked"
    forget(model)
    assert warmth(say(model.trunk("Ada", messages=rules("Ada")), HELLO)).note == ""


def test_a_restore_that_helps_forgets_an_earlier_miss(model: LocalModel, useless: Callable[[bool], None]) -> None:
    trunk = model.trunk("Ada", messages=rules("Ada"))
    for helps in (False, True, False):
        useless(not helps)
        forget(model)
        assert bool(warmth(say(trunk, HELLO)).note) is not helps
    forget(model)
    assert model.trunk("Ada", messages=rules("Ada")).state == "restored"


def test_a_miss_does_not_count_when_others_ran_in_between(model: LocalModel, useless: Callable[[bool], None]) -> None:
    model.trunk("Ada", messages=rules("Ada"))
    for _ in range(3):
        forget(model)
        trunk = model.trunk("Ada", messages=rules("Ada"))
        assert trunk.state == "restored"
        uncached(model, *rules("Bob"), HELLO)
        useless(True)
        assert "other requests came in" in warmth(say(trunk, HELLO)).note
        useless(False)


def test_the_first_reply_after_a_restore_is_its_proof(model: LocalModel) -> None:
    model.trunk("Ada", messages=rules("Ada"))
    forget(model)
    trunk = model.trunk("Ada", messages=rules("Ada"))
    assert [warmth(say(trunk, HELLO)).state for _ in range(2)] == ["restored", "warm"]
    [entry] = store_of(model).entries()
    assert entry.proof
    assert entry.proof.reused >= entry.proof.tokens == trunk.tokens


def test_requests_of_others_take_room_in_the_ledger(model: LocalModel) -> None:
    """With a RAM cache for a few agents, plain chats push trunks out; those come from the disk, not from a reading."""
    capacity = record_of(model).cache_bytes
    trunk = model.trunk("Ada", messages=rules("Ada"))
    with open_ledger(record_of(model), load_settings()) as ledger:
        ledger.capacity = 2_000_000  # as if the cache were this small
    for number in range(8):
        uncached(model, *rules(f"{number} stranger", 3), HELLO)
        model._keeper().bring(model.trunk("Bob", messages=rules("Bob"))._prefix, "Bob")
    assert warmth(say(trunk, HELLO)).state == "restored"
    with open_ledger(record_of(model), load_settings()) as ledger:
        ledger.capacity = capacity


# --- where nothing can be saved --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "changed", "why"),
    [
        ({"LLAMA_SLOT_SAVE_PATH": ""}, {}, "not saved: LLAMA_SLOT_SAVE_PATH is empty"),
        ({}, {"parallel": 2}, "not saved: the server has 2 slots"),
        ({"LOOPRUN_TRUNK_BUDGET": "0"}, {}, "not saved: LOOPRUN_TRUNK_BUDGET is 0"),
    ],
    ids=["no folder", "slots", "no budget"],
)
def test_what_cannot_be_saved_is_said_and_works(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], changed: dict[str, int], why: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with local_model(profile(STATE, **changed)) as model:
        told = uncached(model, *rules("Ada"), HELLO)
        trunk = model.trunk("Ada", messages=rules("Ada"))
        assert (trunk.state, trunk.bytes) == ("cold", 0)
        assert trunk.note.startswith(why)
        reply = say(trunk, HELLO)
        assert text(reply) == told
        assert warmth(reply).reused >= trunk.tokens


def test_weights_that_changed_under_the_server_are_not_saved_for(model: LocalModel, tmp_path: Path) -> None:
    record = record_of(model)
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(record.model_path, copy)
    os.utime(copy, (record.started + 10, record.started + 10))
    original, record.model_path = record.model_path, str(copy)
    changed = model.trunk("Ada", messages=rules("Ada"))
    assert (changed.state, "was changed since" in changed.note) == ("cold", True)
    copy.unlink()
    gone_now = model.trunk("Bob", messages=rules("Bob"))
    assert (gone_now.state, "No such file" in gone_now.note) == ("cold", True)
    record.model_path = original


def test_another_server_is_no_place_for_trunks(profile: Profile) -> None:
    with LoopbackServer(lambda _: Reply({"data": [{"id": "fake"}]})) as server:
        alias = profile("tiny-qwen35", served_id="fake")
        with local_model(alias, runtime=ExternalRuntime(server.url)) as model:
            with pytest.raises(UsageError, match="trunks need a server that looprun runs") as caught:
                model.trunk("Ada", messages=rules("Ada"))
            assert "runtime=" in caught.value.hint


MOUNTED = """
import json, subprocess, sys
from pathlib import Path
from looprun_models import local_model, warmth
from tests.test_trunks import HELLO, rules, say, text, uncached
def fill(path):
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass
def turn(model, name, told):
    trunk = model.trunk(name, messages=rules(name))
    print(json.dumps([trunk.state, trunk.note]), flush=True)
    reply = say(trunk, HELLO)
    assert text(reply) == told[name], name
    assert warmth(reply).reused >= trunk.tokens
    return trunk
folder = Path(sys.argv[2])
with local_model(sys.argv[1]) as model:
    told = {name: uncached(model, *rules(name), HELLO) for name in ("Ada", "Bob", "Cyd")}
    ada = turn(model, "Ada", told)
    fill(folder / "foreign")
    turn(model, "Bob", told)
    assert text(say(ada, HELLO)) == told["Ada"]
    (folder / "foreign").unlink()
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    turn(model, "Cyd", told)
    assert text(say(ada, HELLO)) == told["Ada"]
"""


@pytest.mark.skipif(not may_mount(), reason="mounts a file system of its own")
def test_a_full_or_read_only_disk_never_fails_a_turn(
    alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    monkeypatch.setenv("LLAMA_SLOT_SAVE_PATH", str(folder))
    monkeypatch.setenv("LOOPRUN_TRUNK_BUDGET", "1")
    run = 'mount -t tmpfs -o size=1m,mode=700 tmpfs "$4" && exec "$1" -c "$2" "$3" "$4"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", run, "sh", sys.executable, MOUNTED, alias, str(folder)],
        capture_output=True,
        text=True,
        cwd=REPO,
    )
    assert done.stderr == ""
    states, notes = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    assert states == ("baked", "cold", "cold")
    assert notes[1].startswith(f"not saved: the disk of {folder} is full")
    assert notes[2].startswith(f"not saved: {folder} cannot be written")


def test_any_text_is_a_label_and_the_budget_holds(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ("a/b", "..", "ü", "x" * 300, "A", "a", "", "\n")
    sizes = [model.trunk(label, messages=rules(f"{number} agent")).bytes for number, label in enumerate(labels)]
    assert all(sizes)
    store = store_of(model)
    assert {entry.meta.label for entry in store.entries()} == set(labels)
    for number, label in enumerate(labels):
        [entry] = labelled(store, record_of(model).alias, label)
        forget(model)
        trunk = model.trunk(label, messages=rules(f"{number} agent"))
        assert (trunk.state, trunk.bytes) == ("restored", entry.size)
    monkeypatch.setenv("LOOPRUN_TRUNK_BUDGET", str(3.5 * max(sizes) / 1e9))
    for number in range(6):
        model.trunk(f"late {number}", messages=rules(f"{number} latecomer"))
        assert store.total() <= 3.5 * max(sizes)
    assert [entry.meta.label for entry in store.entries()] == ["late 5", "late 4", "late 3"]


def test_a_store_that_is_cleared_meanwhile_is_filled_again(model: LocalModel) -> None:
    trunk = model.trunk("Ada", messages=rules("Ada"))
    shutil.rmtree(store_of(model).folder)
    assert warmth(say(trunk, HELLO)).state == "warm"
    forget(model)
    assert warmth(say(trunk, HELLO)).state == "baked"
    assert (trunk.state, len(store_of(model).entries())) == ("baked", 1)


@pytest.mark.parametrize("known", [True, False], ids=["known format", "unknown format"])
def test_what_others_put_into_the_slot_is_not_saved_for_the_trunk(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Another prompt of as many tokens, between reading and saving: once, and then every time."""
    told = uncached(model, *rules("Ada"), HELLO)
    read, in_between = Slot.read, iter([False, True, False, False, True, False, True])

    def disturbed(slot: Slot, tokens: Any) -> Any:
        reading = read(slot, tokens)
        if len(tokens) > 1 and next(in_between):
            slot._post("/completion", {"prompt": [tokens[0] + 1, *tokens[1:]], "n_predict": 0}, 60)
        return reading

    monkeypatch.setattr(Slot, "read", disturbed)
    if not known:
        monkeypatch.setattr("looprun_models.trunks.saved_tokens", lambda _: None)
    next(in_between)
    trunk = model.trunk("Ada", messages=rules("Ada"))
    assert (trunk.state, trunk.note) == ("baked", "")
    forget(model)
    reply = say(trunk, HELLO)
    assert text(reply) == told
    assert warmth(reply).reused >= trunk.tokens
    next(in_between)
    monkeypatch.setattr("looprun_models.trunks.BAKE_TRIES", 1)
    never = model.trunk("Bob", messages=rules("Bob"))
    assert (never.state, never.note) == ("cold", "not saved: other requests came in between")
    assert len(store_of(model).entries()) == 1


# --- killed in between -----------------------------------------------------------------------------------------------


BAKER = """
import json, os, signal, sys
from looprun_models import local_model, warmth
from looprun_models import slot, trunkstore
from tests.test_trunks import HELLO, rules, say, text
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def after(owner, name):
    original = getattr(owner, name)
    def patched(*args, **options):
        result = original(*args, **options)
        die()
    setattr(owner, name, patched)
when = sys.argv[2]
if when == "reading":
    exchange = slot.post_json
    def cut(host, port, path, key, timeout, body):
        if path == "/completion":
            import socket
            told = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.0\\r\\nContent-Length: {len(told)}\\r\\n\\r\\n"
            socket.create_connection((host, port)).sendall(head.encode() + told)
            die()
        return exchange(host, port, path, key, timeout, body)
    slot.post_json = cut
elif when == "before saving":
    after(trunkstore.TrunkStore, "reserve")
elif when == "after saving":
    after(slot.Slot, "save")
with local_model(sys.argv[1]) as model:
    print("ready", flush=True)
    if when == "at once":
        sys.stdin.readline()
    trunk = model.trunk("Ada", messages=rules("Ada", 30))
    state = trunk.state
    print(json.dumps([state, text(say(trunk, HELLO))]), flush=True)
"""


def baker(alias: str, when: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BAKER, alias, when],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
    )


@pytest.mark.parametrize("when", ["reading", "before saving", "after saving"])
def test_a_client_that_is_killed_while_it_bakes_leaves_nothing_half_made(alias: str, when: str) -> None:
    with local_model(alias) as model:
        told = uncached(model, *rules("Ada", 30), HELLO)
        process = baker(alias, when)
        _, complaint = process.communicate(timeout=60)
        assert (process.returncode, complaint) == (-signal.SIGKILL, "")
        assert store_of(model).entries() == []
        trunk = model.trunk("Ada", messages=rules("Ada", 30))
        assert trunk.state == "baked"
        assert text(say(trunk, HELLO)) == told
        assert parts_of(store_of(model)) == []
        forget(model)
        again = model.trunk("Ada", messages=rules("Ada", 30))
        assert again.state == "restored"
        assert text(say(again, HELLO)) == told


def test_two_processes_that_bake_one_trunk_at_once(alias: str) -> None:
    with local_model(alias) as model:
        told = uncached(model, *rules("Ada", 30), HELLO)
        both = [baker(alias, "at once") for _ in range(2)]
        for process in both:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        for process in both:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=60) for process in both]
        assert [complaint for _, complaint in answers] == ["", ""]
        assert sorted(json.loads(said) for said, _ in answers) == [["baked", told], ["warm", told]]
        [entry] = store_of(model).entries()
        assert store_of(model).check(entry.key)[0] == entry
        assert parts_of(store_of(model)) == []


def killing(model: LocalModel, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """The server is killed in this action, which has got halfway."""

    def cut(slot: Slot, file: str) -> tuple[int, int]:
        if action == "save":
            (store_of(model).folder / file).write_bytes(b"\x71\x67\x73\x67" * 100)
        kill(model)
        raise SlotRefused(f"/slots/0?action={action}: it has ended", 0)

    monkeypatch.setattr(Slot, action, cut)


@pytest.mark.parametrize("action", ["save", "restore"])
def test_a_server_that_is_killed_in_between_leaves_nothing_half_made(
    alias: str, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    with local_model(alias) as model:
        told = uncached(model, *rules("Ada"), HELLO)
        if action == "restore":
            model.trunk("Ada", messages=rules("Ada"))
            forget(model)
        with monkeypatch.context() as patch:
            killing(model, patch, action)
            with pytest.raises(ServerUnavailable, match="was killed"):
                model.trunk("Ada", messages=rules("Ada"))
        store = store_of(model)
        assert parts_of(store) == []
    with local_model(alias) as model:
        trunk = model.trunk("Ada", messages=rules("Ada"))
        assert trunk.state == "baked"
        assert text(say(trunk, HELLO)) == told
        [entry] = store.entries()
        assert store.check(entry.key)[0] == entry


def test_a_server_that_is_gone_is_said_by_the_call(alias: str) -> None:
    with local_model(alias) as model:
        trunk = model.trunk("Ada", messages=rules("Ada"))
        kill(model)
        with pytest.raises(ServerUnavailable, match="was killed"):
            say(trunk, HELLO)
        with pytest.raises(ServerUnavailable, match="was killed"):
            model.trunk("Bob", messages=rules("Bob"))
    with local_model(alias) as model:
        again = model.trunk("Ada", messages=rules("Ada"))
        assert again.state == "restored"
        assert warmth(say(again, HELLO)).note == ""


# --- async -----------------------------------------------------------------------------------------------------------


def test_the_same_for_async_code(alias: str) -> None:
    async def run() -> None:
        async with async_local_model(alias) as model:
            trunk = await model.trunk("Ada", messages=rules("Ada"))
            assert trunk.state == "baked"
            first = await trunk.create(messages=[HELLO], temperature=0, max_tokens=12)
            assert warmth(first).reused >= trunk.tokens
            stream = await trunk.create(messages=[HELLO], temperature=0, max_tokens=12, stream=True)
            chunks = [chunk async for chunk in stream]
            assert len(chunks) > 5
            assert warmth(stream).reused >= trunk.tokens - 4
            others = await asyncio.gather(*(model.trunk(name, messages=rules(name)) for name in ("Bob", "Cyd")))
            assert [other.state for other in others] == ["baked", "baked"]
            replies = await asyncio.gather(
                *(each.create(messages=[HELLO], temperature=0, max_tokens=12) for each in (trunk, *others))
            )
            assert text(replies[0]) == text(first)
            with pytest.raises(UsageError):
                await model.trunk("none", messages=[])
            await cancelled(model, trunk, text(first))

    asyncio.run(run())


async def cancelled(model: Any, trunk: Any, told: str) -> None:
    """Neither a bake nor a turn that nobody waits for any more harms the next."""
    baking = asyncio.create_task(model.trunk("Dan", messages=rules("Dan", 60)))
    await asyncio.sleep(0)
    baking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await baking
    turn = asyncio.create_task(trunk.create(messages=[HELLO], temperature=0, max_tokens=2000))
    await asyncio.sleep(0)
    turn.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await turn
    reply = await trunk.create(messages=[HELLO], temperature=0, max_tokens=12)
    assert text(reply) == told
    assert (await model.trunk("Dan", messages=rules("Dan", 60))).state in ("baked", "warm")


# --- what callers give -----------------------------------------------------------------------------------------------


def test_contents_that_can_be_read_once_reach_the_server(model: LocalModel) -> None:
    trunk = model.trunk("Ada", messages=rules("Ada"))
    parts = [{"type": "text", "text": "Who are you, and where do you come from?"}]
    once = say(trunk, {"role": "user", "content": (part for part in parts)})
    again = say(trunk, {"role": "user", "content": parts})
    assert once.usage.prompt_tokens == again.usage.prompt_tokens > trunk.tokens + 10
    assert warmth(once).drift is None


def test_what_cannot_be_a_trunk_or_a_turn_is_a_usage_error_before_anything_is_read(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = model.trunk("Ada", messages=rules("Ada"))
    monkeypatch.setattr(Slot, "_post", None)
    monkeypatch.setattr(model.chat.completions, "create", None)
    label: Any
    for label in (None, 123):
        with pytest.raises(UsageError, match=f"label: expected a text, found {label}"):
            model.trunk(label, messages=rules("Ada"))
    nothing: Any
    for nothing in (None, ["x"], "x", {"role": "user", "content": "x"}):
        with pytest.raises(UsageError, match=r"messages.*: expected a"):
            model.trunk("x", messages=nothing)
        with pytest.raises(UsageError, match=r"messages.*: expected a"):
            trunk.create(messages=nothing)
    with pytest.raises(UsageError, match=r"tools\[0\]: expected"):
        trunk.create(messages=[HELLO], tools=["f"])
