"""What the environment may say: every variable, what blank means, and what a bad value is told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from looprun_models.errors import BadSetting, FolderUnwritable
from looprun_models.settings import Settings, load_settings, private_dir

NUMBERS = {
    "LLAMA_PORT": "a port from 1 to 65535",
    "LLAMA_CTX": "a number of tokens above 0",
    "LLAMA_CACHE_RAM": "a number of MiB, 0 or more",
    "LOOPRUN_KEEP_ALIVE": "a number of seconds, 0 or more",
    "LOOPRUN_TRUNK_BUDGET": "a number of GB, 0 or more",
}
FIELDS = {
    "LLAMA_BIN": "llama_bin",
    "LLAMA_PORT": "port",
    "LLAMA_KV": "kv",
    "LLAMA_CTX": "ctx",
    "LLAMA_CACHE_RAM": "cache_ram",
    "LLAMA_SLOT_SAVE_PATH": "slot_save_path",
    "LLAMA_SPEC_TYPE": "spec_type",
    "LOOPRUN_KEEP_ALIVE": "keep_alive",
    "LOOPRUN_TRUNK_BUDGET": "trunk_budget",
    "LOOPRUN_EXTERNAL_URL": "external_url",
    "LOOPRUN_EXTERNAL_KEY": "external_key",
    "LOOPRUN_EXTERNAL_MODEL": "external_model",
}
OFF_WHEN_BLANK = ("LLAMA_SLOT_SAVE_PATH", "LLAMA_SPEC_TYPE")
posix = pytest.mark.skipif(sys.platform == "win32", reason="modes and HOME")


def settings(**variables: str) -> Settings:
    return load_settings({"HOME": os.environ["HOME"], **variables})


def test_an_empty_environment_decides_nothing() -> None:
    found = settings()
    assert {name: getattr(found, field) for name, field in FIELDS.items()} == dict.fromkeys(FIELDS)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("LLAMA_BIN", "/opt/llama/llama-server", "/opt/llama/llama-server"),
        ("LLAMA_PORT", "1", 1),
        ("LLAMA_PORT", "65535", 65535),
        ("LLAMA_KV", "q8_0", "q8_0"),
        ("LLAMA_KV", "f16", "f16"),
        ("LLAMA_CTX", "1", 1),
        ("LLAMA_CACHE_RAM", "0", 0),
        ("LLAMA_SLOT_SAVE_PATH", "~/slots", "~/slots"),
        ("LLAMA_SPEC_TYPE", "draft-mtp", "draft-mtp"),
        ("LOOPRUN_KEEP_ALIVE", "0.5", 0.5),
        ("LOOPRUN_TRUNK_BUDGET", "1.5", 1_500_000_000),
        ("LOOPRUN_TRUNK_BUDGET", "0", 0),
        ("LOOPRUN_EXTERNAL_URL", "http://127.0.0.1:1234/v1", "http://127.0.0.1:1234/v1"),
        ("LOOPRUN_EXTERNAL_KEY", "k", "k"),
        ("LOOPRUN_EXTERNAL_MODEL", "m", "m"),
    ],
)
@pytest.mark.parametrize("around", ["{}", "  {} ", '"{}"', "'{}'", "{}\r", ' "{}" \r\n'])
def test_a_value_is_read_without_its_wrapping(variable: str, text: str, value: object, around: str) -> None:
    assert getattr(settings(**{variable: around.format(text)}), FIELDS[variable]) == value


@pytest.mark.parametrize("blank", ["", "  ", '""', "\r"])
@pytest.mark.parametrize("variable", FIELDS)
def test_blank_means_unset_or_off(variable: str, blank: str) -> None:
    expected = "" if variable in OFF_WHEN_BLANK else None
    assert getattr(settings(**{variable: blank}), FIELDS[variable]) == expected


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *[("LLAMA_PORT", value) for value in ("0", "65536", "-1", "80.5", "http", "0x50")],
        *[("LLAMA_CTX", value) for value in ("0", "-4096", "8k", "1e4")],
        *[("LLAMA_CACHE_RAM", value) for value in ("-1", "512M", "1.5")],
        *[("LOOPRUN_KEEP_ALIVE", value) for value in ("-1", "inf", "nan", "5m")],
        *[("LOOPRUN_TRUNK_BUDGET", value) for value in ("-1", "inf", "nan", "8GB", "1e300")],
    ],
)
def test_a_number_out_of_range_names_variable_value_and_range(variable: str, value: str) -> None:
    with pytest.raises(BadSetting) as raised:
        settings(**{variable: value})
    assert str(raised.value) == (
        f"{variable}={value!r} cannot be used: it takes {NUMBERS[variable]}.\n  next: change or unset {variable}"
    )
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("value", ["Q8_0", "q4_0", "f32", "8"])
def test_an_unmeasured_kv_type_is_refused(value: str) -> None:
    with pytest.raises(BadSetting, match=f"LLAMA_KV='{value}' cannot be used: it takes q8_0 or f16"):
        settings(LLAMA_KV=value)


def test_settings_are_frozen_and_keep_the_environment_as_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CTX", "4096")
    found = load_settings()
    monkeypatch.setenv("LLAMA_CTX", "8192")
    assert (found.ctx, found.environ["LLAMA_CTX"]) == (4096, "4096")
    with pytest.raises(AttributeError):
        found.ctx = 1  # type: ignore[misc]


def test_a_profiles_path_variable_expands_the_home_of_this_environment(home: Path) -> None:
    found = load_settings({"HOME": str(home / "other"), "MY_GGUF": ' "~/m odels/x.gguf"\r'})
    assert found.model_path("MY_GGUF") == home / "other" / "m odels" / "x.gguf"
    assert found.model_path("UNSET") is None
    assert load_settings({"HOME": str(home), "MY_GGUF": " "}).model_path("MY_GGUF") is None


def test_folders_follow_their_variables(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(LOOPRUN_STATE_DIR="~/state", LOOPRUN_CACHE_DIR=f"'{home}/cache'")
    assert (found.state_dir, found.cache_dir) == (home / "state", home / "cache")
    assert (found.servers_dir, found.logs_dir) == (home / "state" / "servers", home / "state" / "logs")
    monkeypatch.chdir(home)
    assert settings(LOOPRUN_STATE_DIR="here").state_dir == home / "here"


def test_folders_lie_in_the_home_by_default(home: Path) -> None:
    found = settings(LOOPRUN_STATE_DIR=" ", LOOPRUN_CACHE_DIR="")
    for folder in (found.state_dir, found.cache_dir, found.user_profiles_dir, found.choice_file):
        assert folder.is_relative_to(home)


@posix
def test_a_missing_home_is_no_obstacle_to_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    monkeypatch.setenv("HOME", "/nonexistent/home")
    assert load_settings().home == Path("/nonexistent/home")
    registered = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for odd in ("", "relative/home"):
        monkeypatch.setenv("HOME", odd)
        assert load_settings().home == registered
        assert load_settings().state_dir.is_absolute()
    monkeypatch.delenv("HOME")
    assert load_settings().home == registered


@posix
def test_without_any_home_only_writing_fails_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import pwd

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    found = load_settings()
    assert found.home is None
    for named in (found.state_dir, load_settings({"LOOPRUN_STATE_DIR": "~/state"}).state_dir):
        with pytest.raises(FolderUnwritable) as raised:
            private_dir(named, "LOOPRUN_STATE_DIR")
        assert "there is no home folder" in str(raised.value)
        assert "set LOOPRUN_STATE_DIR to a folder that you may write to" in str(raised.value)
    assert not (tmp_path / "~").exists()


@posix
def test_a_private_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    folder = private_dir(tmp_path / "a" / "b", "LOOPRUN_STATE_DIR")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert private_dir(folder, "LOOPRUN_STATE_DIR").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_file_in_the_way_of_a_folder_is_named_with_the_variable_that_moves_it(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderUnwritable) as raised:
        private_dir(tmp_path / below, "LOOPRUN_CACHE_DIR")
    assert str(raised.value).startswith(f"cannot write to {tmp_path / below}: ")
    assert raised.value.hint == "set LOOPRUN_CACHE_DIR to a folder that you may write to"
    assert raised.value.exit_code == 1


@posix
def test_a_read_only_folder_is_noticed_before_something_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere, so the answer is ordered
    with pytest.raises(FolderUnwritable, match="Permission denied"):
        private_dir(tmp_path / "ro", "LOOPRUN_STATE_DIR")
