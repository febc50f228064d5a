"""What is learned of a llama-server: version, flags, devices, and the environment it runs in."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from looprun_models import engine as engine_module
from looprun_models.engine import devices, identity_of, parse_build, parse_flags, system_config
from looprun_models.probe import child_environ
from looprun_models.search import find_engine
from tests.engines import calls_of, good, make_engine, settings_with, why_not

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="the fake engines are scripts with a shebang"),
    pytest.mark.usefixtures("nothing_installed"),
]

RECIPE = {
    "-m", "--host", "--port", "--alias", "--jinja", "-fa", "-ngl", "-np", "-c", "-ctk", "-ctv", "-ctxcp", "--cache-ram",
    "--slot-save-path", "--spec-type", "--metrics", "--slots", "--cors-origins",
}  # fmt: skip
LEAKS = {
    "LLAMA_ARG_HOST": "0.0.0.0", "LLAMA_ARG_THREADS": "", "LLAMA_API_KEY": "x", "AIP_MODE": "PREDICTION",
    "LLAMA_SERVER_ROUTER_PORT": "1", "LLAMA_APP_CMD": "serve",
}  # fmt: skip


class TestVersion:
    @pytest.mark.parametrize(
        ("line", "build"),
        [
            ("version: 9780 (abc1234)", 9780),
            ("version: 10005 (d)", 10005),
            ("version: b10217-ddd4ec", 10217),
            ("b10217-ddd4ec", 10217),
            ("version: 0.6.0-dev (build 11434, commit unknown)", 11434),
            ("version: xllamacpp 2026.10.11434 (build 11434, commit 1234567)", 11434),
            ("llama-server version: build b11434", 11434),
            ("11434", 11434),
            ("version: 0.1.0-dev (build 1, commit 7e4c0a9)", None),
            ("version: 0 (unknown)", None),
            ("version: 1 (9999999)", None),
            ("version: 0.6.0", None),
            ("", None),
        ],
    )
    def test_every_known_form(self, line: str, build: int | None) -> None:
        assert parse_build(line) == build

    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    @pytest.mark.parametrize("text", ["version: 11434 (a)\nbuilt with GNU 12.2.0 for Linux", "version: b11434-abc"])
    def test_either_stream(self, tmp_path: Path, stream: str, text: str) -> None:
        path = make_engine(tmp_path, version=text, version_stream="stdout" if stream == "stdout" else "stderr")
        assert good(path).build == 11434

    def test_what_libraries_say_first_is_not_taken_for_the_version(self, tmp_path: Path) -> None:
        path = make_engine(
            tmp_path,
            version="Device 0: NVIDIA, compute capability 8.9, VMM: yes, driver version 535.104\n"
            "load_backend: loaded CPU backend from /opt/llamacpp-b9000/libggml-cpu.so\n"
            "version: 11434 (abc1234)\nbuilt with GNU 12.2.0",
        )
        found = good(path)
        assert (found.version, found.build) == ("version: 11434 (abc1234)", 11434)

    @pytest.mark.parametrize("text", ["version: 0 (unknown)", "version: 0.1.0-dev (build 1, commit a)", "hello"])
    def test_a_vendors_build_without_a_number_is_allowed_with_a_note(self, tmp_path: Path, text: str) -> None:
        found = good(make_engine(tmp_path, version=text))
        assert found.build is None
        assert found.note == "its build number is unknown; its flags were checked instead"
        assert found.label == f"build unknown ({found.path})"

    def test_a_numbered_build_needs_no_note(self, tmp_path: Path) -> None:
        found = good(make_engine(tmp_path, version="version: 9780 (abc)"))
        assert (found.label, found.note) == (f"b9780 ({found.path})", "")


class TestHelp:
    def test_all_names_of_the_recipe_are_read(self, tmp_path: Path) -> None:
        found = good(make_engine(tmp_path))
        assert RECIPE | {"--ctx-checkpoints", "-cram", "--no-jinja", "--n-cpu-moe"} <= found.flags

    @pytest.mark.parametrize(
        ("dialect", "mlock", "load_mode"), [("old", True, False), ("deprecated", True, True), ("new", False, True)]
    )
    def test_each_dialect_of_locking(self, tmp_path: Path, dialect: str, mlock: bool, load_mode: bool) -> None:
        found = good(make_engine(tmp_path, dialect=dialect))  # type: ignore[arg-type]
        assert (found.has("--mlock"), found.has("--load-mode")) == (mlock, load_mode)

    def test_a_removed_flag_is_not_a_flag(self, tmp_path: Path) -> None:
        found = good(make_engine(tmp_path, help_removed=["--cors-origins"]))
        assert not found.flags & {"--draft", "--draft-max", "--cors-origins"}
        assert found.has("--spec-type")

    def test_words_of_a_description_are_not_flags(self) -> None:
        flags = parse_flags(
            "----- common params -----\n\n-a,    --alias STRING                   names, see --id\n"
            "                                        --not-a-flag\n--old, --older N                        the "
            "argument has\n                                        been removed. use --new\n-x\n"
        )
        assert flags == {"-a", "--alias", "-x"}

    def test_added_flags_are_seen(self, tmp_path: Path) -> None:
        found = good(make_engine(tmp_path, help_add=["-zz,   --zebra N                        stripes"]))
        assert found.has("--zebra", "--none")
        assert not found.has("--none")


class TestMemory:
    def test_a_program_is_asked_once_for_each_version_of_its_file(self, tmp_path: Path) -> None:
        calls = tmp_path / "calls"
        path = make_engine(tmp_path / "bin", calls=str(calls))
        first = good(path)
        engine_module._memory.cache_clear()  # as the next process
        assert good(path) == first
        assert [call["argv"] for call in calls_of(calls)] == [["--version"], ["--help"]]

    def test_a_changed_file_is_asked_again(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path, version="version: 10000 (a)")
        before = good(path)
        make_engine(tmp_path, version="version: 11000 (ab)")
        after = good(path)
        assert (before.build, after.build) == (10000, 11000)
        assert before.identity != after.identity

    def test_a_touched_file_is_asked_again(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path)
        before = good(path)
        os.utime(path, ns=(1, 1))
        assert good(path).identity != before.identity

    def test_a_candidate_that_was_broken_gets_another_chance(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path, version_exit=1)
        why_not(path)
        stat = path.stat()
        make_engine(tmp_path, version_exit=0)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert path.stat().st_size == stat.st_size
        assert good(path).build == 11434

    def test_a_cache_that_cannot_be_written_costs_only_time(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        path = make_engine(tmp_path / "bin")
        for _ in range(2):
            found = find_engine(settings_with(LLAMA_BIN=str(path), LOOPRUN_CACHE_DIR=str(tmp_path / "file" / "cache")))
            assert found.path == path

    @pytest.mark.parametrize("content", ["{", "[]", '{"IDENTITY": {"version": 3}}', '{"IDENTITY": null}'])
    def test_a_damaged_cache_is_as_good_as_none(self, tmp_path: Path, content: str) -> None:
        path = make_engine(tmp_path)
        identity = good(path).identity
        cache = settings_with().cache_dir / "engines.json"
        assert identity in json.loads(cache.read_text())
        cache.write_text(content.replace("IDENTITY", identity))
        engine_module._memory.cache_clear()
        assert good(path).build == 11434


class TestIdentity:
    """Official builds are a small stub: the engine is in the libraries beside it."""

    def test_it_starts_with_the_real_path_and_is_short(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path / "opt")
        (tmp_path / "link").symlink_to(path)
        found = good(tmp_path / "link")
        assert found.identity == identity_of(path) == identity_of(tmp_path / "link")
        assert re.fullmatch(rf"{path}:[0-9a-f]{{16}}", found.identity)

    def test_of_what_is_gone(self, tmp_path: Path) -> None:
        assert identity_of(tmp_path / "gone") is None
        assert identity_of(tmp_path / "gone" / "below") is None

    @pytest.mark.parametrize("name", ["libllama.so", "libllama.so.0.6.0", "libggml.dylib", "ggml-cpu.dll", "x.abi3.so"])
    @pytest.mark.parametrize("change", ["added", "removed", "grown", "touched", "linked to another"])
    def test_a_library_beside_the_program_changes_it(self, tmp_path: Path, name: str, change: str) -> None:
        path = make_engine(tmp_path)
        library = tmp_path / name
        (tmp_path / "elsewhere").write_bytes(b"other one")
        if change != "added":
            library.write_bytes(b"engine")
        before = identity_of(path)
        if change == "removed":
            library.unlink()
        elif change == "touched":
            os.utime(library, ns=(1, 1))
        elif change == "linked to another":
            library.unlink()
            library.symlink_to(tmp_path / "elsewhere")
        else:
            library.write_bytes(b"engine, longer")
        assert identity_of(path) != before

    def test_what_is_no_library_does_not_change_it(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path)
        before = identity_of(path)
        (tmp_path / "LICENSE").write_text("MIT")
        (tmp_path / "llama-cli").write_text("")
        (tmp_path / "libgone.so").symlink_to("gone")
        (tmp_path / "folder.so").mkdir()
        assert identity_of(path) == before

    def test_the_libraries_of_an_installed_one_are_in_its_lib_folder(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path / "bin")
        (tmp_path / "lib").mkdir()
        before = identity_of(path)
        (tmp_path / "lib" / "libcurl.so.4").write_bytes(b"not ours")
        assert identity_of(path) == before
        (tmp_path / "lib" / "libllama.so.0").write_bytes(b"engine")
        assert identity_of(path) != before

    def test_the_embedded_engine_is_also_made_of_our_wrapper(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "__init__.py"
        package.write_text("")
        wrapper = tmp_path / "wrapper" / "embedded.py"
        wrapper.parent.mkdir()
        wrapper.write_text("")
        monkeypatch.setattr(engine_module, "WRAPPER", wrapper)
        before, other = identity_of(package), identity_of(make_engine(tmp_path))
        wrapper.write_text("changed")
        assert identity_of(package) != before
        assert identity_of(tmp_path / "llama-server") == other

    def test_a_replaced_library_has_the_program_asked_again_and_the_old_answers_forgotten(self, tmp_path: Path) -> None:
        calls = tmp_path / "calls"
        path = make_engine(tmp_path / "bin", calls=str(calls))
        other = good(make_engine(tmp_path / "other"))
        for content in (b"one", b"other"):
            (tmp_path / "bin" / "libllama.so").write_bytes(content)
            found = good(path)
        assert len(calls_of(calls)) == 4
        known = json.loads((settings_with().cache_dir / "engines.json").read_text())
        assert [name for name in known if name.startswith(str(tmp_path))] == [other.identity, found.identity]


class TestChild:
    def test_variables_that_change_an_engine_do_not_reach_the_probes(self, tmp_path: Path) -> None:
        calls = tmp_path / "calls"
        path = make_engine(tmp_path / "bin", calls=str(calls))
        good(path, **LEAKS, GGML_VULKAN_DEVICE="1")
        assert len(calls_of(calls)) == 2
        for call in calls_of(calls):
            assert not [name for name in call["env"] if name.startswith(("LLAMA_ARG_", "LLAMA_SERVER_", "AIP_"))]
            assert not {"LLAMA_API_KEY", "LLAMA_APP_CMD"} & set(call["env"])
            assert call["env"]["GGML_VULKAN_DEVICE"] == "1"
            assert call["cwd"] == "/"

    def test_what_was_kept_back_is_told(self) -> None:
        env, dropped = child_environ(settings_with(**LEAKS, LLAMA_CTX="4096"))
        assert dropped == tuple(sorted(LEAKS))
        assert env["LLAMA_CTX"] == "4096"
        assert env["GGML_NO_BACKTRACE"] == "1"

    def test_the_users_own_engine_config_is_out_of_reach(self, home: Path) -> None:
        env, _ = child_environ(settings_with(XDG_CONFIG_HOME=str(home / ".config")))
        assert not (Path(env["XDG_CONFIG_HOME"]) / "llama.cpp").exists()
        assert Path(env["XDG_CONFIG_HOME"]) != home / ".config"

    def test_a_machine_wide_engine_config_is_detected(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        exists: Callable[[Path], bool] = Path.exists
        monkeypatch.setattr(Path, "exists", lambda p: str(p) == "/etc/llama.cpp/config.ini" or exists(p))
        assert system_config(settings_with()) == Path("/etc/llama.cpp/config.ini")

    def test_a_link_is_executed_by_its_real_path(self, tmp_path: Path) -> None:
        calls = tmp_path / "calls"
        real = make_engine(tmp_path / "opt" / "llama", calls=str(calls))
        link = tmp_path / "llama-server"
        link.symlink_to(real)
        found = good(link)
        assert (found.path, found.command) == (real, (str(real),))
        assert {call["program"] for call in calls_of(calls)} == {str(real)}

    def test_the_programs_own_folder_helps_the_loader_only_when_it_must(self, tmp_path: Path) -> None:
        folder = tmp_path / "moved"
        path = make_engine(folder, needs_library_path=str(folder))
        found = good(path)
        assert found.library_path
        plain = good(make_engine(tmp_path / "plain"))
        assert not plain.library_path
        env, _ = child_environ(settings_with(LD_LIBRARY_PATH="/usr/local/cuda/lib64"), library_path=folder)
        if sys.platform == "linux":
            assert env["LD_LIBRARY_PATH"] == f"{folder}:/usr/local/cuda/lib64"
        env, _ = child_environ(settings_with())
        assert "LD_LIBRARY_PATH" not in env

    @pytest.mark.parametrize(
        ("before", "expected"),
        [("", "/opt/llama:/usr/local/lib:/usr/lib"), ("/mine", "/opt/llama:/mine:/usr/local/lib:/usr/lib")],
    )
    def test_macos_looks_in_the_programs_folder_then_in_the_others(
        self, monkeypatch: pytest.MonkeyPatch, before: str, expected: str
    ) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        made = settings_with(DYLD_FALLBACK_LIBRARY_PATH=before)
        env, _ = child_environ(made, library_path=Path("/opt/llama"))
        assert env["DYLD_FALLBACK_LIBRARY_PATH"] == expected
        assert "LD_LIBRARY_PATH" not in env
        unchanged, _ = child_environ(made)
        assert unchanged["DYLD_FALLBACK_LIBRARY_PATH"] == before


class TestDevices:
    def test_gpus_are_read_and_processors_are_not(self, tmp_path: Path) -> None:
        lines = ["CUDA0: NVIDIA RTX 4060 (8188 MiB, 7900 MiB free)", "CPU: AMD EPYC (16000 MiB, 9000 MiB free)"]
        found = devices(good(make_engine(tmp_path, devices=lines)), settings_with())
        assert [(d.name, d.total, d.free) for d in found] == [("CUDA0: NVIDIA RTX 4060", 8188 << 20, 7900 << 20)]

    def test_a_processor_build_has_none(self, tmp_path: Path) -> None:
        assert devices(good(make_engine(tmp_path)), settings_with()) == ()

    def test_an_engine_that_cannot_say_has_none(self, tmp_path: Path) -> None:
        assert devices(good(make_engine(tmp_path, help_drop=["--list-devices"])), settings_with()) == ()
