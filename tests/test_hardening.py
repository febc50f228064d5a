"""Bad input that a first hostile reader found: each gets one clear error, and nothing is started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looprun_models import local_model
from looprun_models.errors import BadProfile, BadSetting, ReservedFlag, UsageError
from looprun_models.records import list_servers, newest_log
from looprun_models.registry import load_profiles, resolve_alias
from looprun_models.request import Options, split_engine_flags
from looprun_models.runtime import LlamaCppRuntime
from looprun_models.settings import load_settings

Profile = Callable[..., str]


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_alive": "5"},
        {"keep_alive": -1},
        {"timeout": "x"},
        {"timeout": -1},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"port": "8081"},
        {"port": True},
        {"port": 0},
        {"engine_flags": "-t 1"},
        {"engine_flags": ["-t", 1]},
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(profile: Profile, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        local_model(profile(), **wrong)
    assert list_servers(load_settings()) == []


@pytest.mark.parametrize("key", ["", " x ", "a,b", "a\nb", "é"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(profile: Profile, key: str) -> None:
    runtime = LlamaCppRuntime(options=Options(api_key=key))
    with pytest.raises(BadSetting, match=r"--api-key='\.\.\.'"):
        runtime.ensure_server(resolve_alias(profile()))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours_is_not_called_a_taken_port(profile: Profile, host: str) -> None:
    runtime = LlamaCppRuntime(options=Options(host=host, api_key="key"), strict_port=True)
    with pytest.raises(BadSetting, match="address of this machine"):
        runtime.ensure_server(resolve_alias(profile()))


@pytest.mark.parametrize("flag", ["-h", "--help", "--version", "--"])
def test_flags_that_start_no_server_are_refused(flag: str) -> None:
    with pytest.raises(ReservedFlag):
        split_engine_flags([flag])


def test_a_context_no_engine_can_have_is_refused(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CTX", "1")
    with pytest.raises(BadSetting, match="256 tokens"):
        local_model(profile())


@pytest.mark.parametrize(("name", "value"), [("LLAMA_PORT", "٨٠٨١"), ("LOOPRUN_KEEP_ALIVE", "1_000")])
def test_numbers_are_plain_digits(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=name):
        load_settings({"HOME": os.environ["HOME"], name: value})
    assert load_settings({"HOME": os.environ["HOME"], name: value}, lenient=True).port is None


def test_a_state_folder_of_somebody_else_holds_no_server_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is put in by hand: the administrator, who runs CI, is never refused."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "glob", refuse)
    settings = load_settings()
    assert list_servers(settings) == []
    assert newest_log(settings, "smollm2-135m") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"short": ["-x"]},
        {"short": [""]},
        {"ctx": 99999999999999999999},
        {"default_dir": "models"},
        {"file": "a\\u0000.gguf"},
    ],
)
def test_profiles_with_values_nothing_can_use_are_refused(profile: Profile, wrong: dict[str, Any]) -> None:
    profile(**wrong)
    with pytest.raises(BadProfile, match=next(iter(wrong))):
        load_profiles(load_settings())
