"""What every engine must do alike, one property a test: the rows of the table that scripts/test-engines prints.

The engine is LOOPRUN_TEST_ENGINE or the embedded one. What a test notes under "value" is the cell; without it, "yes".
"""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from looprun_models import ContextOverflow, LocalModel, ServerUnavailable, local_model
from looprun_models.engine import FLOOR
from looprun_models.lease import STOPPING_TIMEOUT, Lease, stop_server
from looprun_models.search import find_engine
from looprun_models.settings import load_settings
from looprun_models.wire import Record, get_json, identify, proves
from tests.helpers import gone, port_is_free, wait_for

Profile = Callable[..., str]
Note = Callable[[str, object], None]
MIB = 1 << 20
HELLO = "Hello from the tiny hybrid model."
RULES = "You are agent {}. You know every stone, lock and ferry between the old mill and the sea. "
FOREIGN = "http://evil.example"
pytestmark = pytest.mark.engine


def record_of(model: LocalModel) -> Record:
    assert isinstance(model.server, Lease)
    return model.server.record


def chat(model: LocalModel, *messages: dict[str, str], max_tokens: int = 20, **options: Any) -> Any:
    """The completion, or the stream."""
    return model.chat.completions.create(
        model=model.model,
        messages=messages,  # type: ignore[arg-type]
        **model.pinned(max_tokens=max_tokens),
        **options,
    )


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def text(completion: Any) -> str:
    return str(completion.choices[0].message.content)


class Agent:
    """One agent's conversation; `turn()` gives the share of its prompt that was not read anew."""

    def __init__(self, name: str, model: LocalModel) -> None:
        self.model = model
        self.messages = [{"role": "system", "content": RULES.format(name) * 4}]

    def turn(self, question: str) -> float:
        self.messages.append(user(question))
        reply = chat(self.model, *self.messages, max_tokens=4)
        self.messages.append({"role": "assistant", "content": text(reply)})
        return float(reply.timings["cache_n"] / reply.usage.prompt_tokens)


# --- the recipe ------------------------------------------------------------------------------------------------------


def test_build(record_property: Note) -> None:
    """A vendor's build may call itself 0; then the user is told, and its flags count."""
    engine = find_engine(load_settings())
    if engine.build is None:
        assert "unknown" in engine.note
        record_property("value", "unknown, and said so")
        return
    assert engine.build >= FLOOR
    record_property("value", f"b{engine.build}")


def test_recipe_is_accepted_in_this_dialect(profile: Profile, record_property: Note) -> None:
    command = find_engine(load_settings()).command
    page = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    with local_model(profile()) as model:
        assert text(chat(model, user("hi"))) == HELLO
        argv = psutil.Process(record_of(model).child_pid).cmdline()
        log = Path(record_of(model).log).read_text(encoding="utf-8", errors="replace")
    assert tuple(argv[: len(command)]) == command
    given = argv[len(command) :]
    assert [flag for flag in given if re.match("--?[a-z]", flag) and not listed(flag, page)] == []
    assert "deprecated" not in log.lower()
    for flag, value in {"-ctk": "q8_0", "-ctv": "q8_0", "--spec-type": "draft-mtp"}.items():
        assert given[given.index(flag) + 1] == value
    locks = given.index("--load-mode" if "--load-mode" in given else "--mlock")
    record_property("value", f"`{' '.join(given[locks : locks + 2])}`")


def listed(flag: str, page: str) -> bool:
    """Whether the help has an entry of this name, before any words of explanation."""
    return re.search(rf"^(-[^ \n]*, +)*{re.escape(flag)}(?=[ ,\n]|$)", page, re.MULTILINE) is not None


def test_identity_is_proved_by_a_second_name(profile: Profile, record_property: Note) -> None:
    with local_model(profile()) as model:
        record = record_of(model)
        _, listing = get_json(record.host, record.port, "/v1/models", record.api_key, 5)
        identity = identify(record.host, record.port, record.api_key, 5)
        assert record.unique_alias in listing["data"][0]["aliases"]
        assert identity is not None
        assert identity.aliases[0] == model.model == record.served_id
        assert proves(identity, record)
        record.fingerprint = "of other settings"
        assert not proves(identity, record)
        record_property("value", f"yes; calls itself {identity.build}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is locked")
def test_locked_in_RAM(profile: Profile, record_property: Note) -> None:
    """Or the user is told that the system does not allow it."""
    with local_model(profile()) as model:
        record = record_of(model)
        status = Path(f"/proc/{record.child_pid}/status").read_text(encoding="ascii")
    if any("locked-memory limit" in note for note in record.notes):
        record_property("value", "not allowed here, and said so")
        return
    [locked] = re.findall(r"^VmLck:\s+(\d+) kB", status, re.MULTILINE)
    assert int(locked) << 10 > record.model_size * 0.9, "all but the header of the file"
    record_property("value", f"{(int(locked) << 10) / MIB:.1f} of {record.model_size / MIB:.1f} MiB")


def test_closed_to_other_web_pages(profile: Profile, record_property: Note) -> None:
    """A page may send what it likes; what matters is that it cannot read an answer."""
    with local_model(profile()) as model:
        record = record_of(model)
        connection = http.client.HTTPConnection(record.host, record.port, timeout=30)
        body = '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}'
        headers = {"Origin": FOREIGN, "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        reply = connection.getresponse()
        reply.read()
        connection.close()
    if reply.getheader("Access-Control-Allow-Origin") in ("*", FOREIGN):
        assert reply.status == 401
        record_property("value", "by a key made for each server")
    else:
        record_property("value", "by `--cors-origins`")


# --- drafts, warmth, limits ------------------------------------------------------------------------------------------


def test_drafts_are_accepted_and_change_no_byte(
    profile: Profile, record_property: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model hears the whole context, so a draft that was wrong and kept would show in all that follows."""
    alias = profile("tiny-qwen35-mtp-state")
    with local_model(alias) as drafting:
        drafted = chat(drafting, user("Count, please."), max_tokens=80)
    monkeypatch.setenv("LLAMA_SPEC_TYPE", "")
    with local_model(alias) as plain:
        without = chat(plain, user("Count, please."), max_tokens=80)
    proposed, accepted = drafted.timings["draft_n"], drafted.timings["draft_n_accepted"]
    assert 0 < accepted < proposed, "and some were refused: those are what could change the text"
    assert "draft_n" not in without.timings
    assert text(drafted) == text(without)
    record_property("value", f"{accepted} of {proposed}")


def test_next_turn_is_warm(profile: Profile, record_property: Note) -> None:
    with local_model(profile()) as model:
        agent = Agent("Alpha", model)
        cold, warm = agent.turn("first question"), agent.turn("next question")
    assert cold < 0.1
    assert warm > 0.5
    record_property("value", f"{warm:.0%} reused")


def test_two_agents_stay_warm_over_switches(profile: Profile, record_property: Note) -> None:
    """As much recurrent state a layer as the 35B-A3B has in a tenth of its layers, so with a tenth of its RAM cache."""
    with local_model(profile("wide-qwen35-mtp", ctx=24576, cache_ram_mib=51)) as model:
        agents = Agent("Alpha", model), Agent("Bravo", model)
        for agent in agents:
            for number in range(3):
                agent.turn(f"question {number}")
        kept = [agent.turn(f"switch {number}") for number in range(3) for agent in agents]
    assert min(kept) > 0.5
    record_property("value", f"{min(kept):.0%} or more reused")


@pytest.mark.parametrize("stream", [False, True], ids=["completion", "stream"])
def test_context_overflow_is_told_with_both_numbers(profile: Profile, record_property: Note, stream: bool) -> None:
    with local_model(profile(ctx=512)) as model, pytest.raises(ContextOverflow) as caught:
        chat(model, user("x" * 1024), stream=stream)  # about a token a letter
    assert caught.value.context == 512
    assert caught.value.prompt_tokens > 1024
    record_property("value", f"{caught.value.prompt_tokens} > {caught.value.context} tokens")


# --- stop under load -------------------------------------------------------------------------------------------------


@contextmanager
def endless(profile: Profile) -> Iterator[LocalModel]:
    """A model that would go on for minutes."""
    with local_model(profile("tiny-qwen35-mtp-loop", ctx=32768)) as model:
        yield model


def stop(model: LocalModel) -> str:
    """As `looprun models stop --force`. How long it took, for the table: the steps are TERM, 3 s, TERM, 3 s, KILL."""
    record, began = record_of(model), time.monotonic()
    killed = stop_server(record, force=True)
    seconds = time.monotonic() - began
    assert gone(record.child_pid)
    assert gone(record.supervisor_pid)
    assert port_is_free(record.port)
    assert seconds < STOPPING_TIMEOUT
    return f"{seconds:.1f} s" + (", by KILL" if killed else "")


def test_stop_while_a_stream_is_read(profile: Profile, record_property: Note) -> None:
    with endless(profile) as model:
        stream = chat(model, user("count"), max_tokens=30000, stream=True)
        next(iter(stream))
        record_property("value", stop(model))
        with pytest.raises(ServerUnavailable, match="stopped"):
            for _ in stream:
                pass


def test_stop_while_a_completion_is_awaited(profile: Profile, record_property: Note) -> None:
    told: list[str] = []

    def ask() -> None:
        try:
            chat(model, user("count"), max_tokens=30000)
        except ServerUnavailable as error:
            told.append(str(error))

    def busy() -> bool:
        _, slots = get_json(record.host, record.port, "/slots", record.api_key, 5)
        return bool(slots[0]["is_processing"])

    with endless(profile) as model:
        record = record_of(model)
        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(busy, "the request is being answered")
        record_property("value", stop(model))
        asking.join()
    assert len(told) == 1
    assert "stopped" in told[0]
