"""The launch plan: every flag with its origin, what is refused before anything starts, and the memory it takes.

Everything here is pure: machines, engines and headers are made by hand, with the published shapes of the models.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from looprun_models.engine import Device, Engine, parse_flags
from looprun_models.errors import (
    BadSetting,
    EngineTooLittle,
    LooprunError,
    NotEnoughMemory,
    ReservedFlag,
    UsageError,
    WeightsBad,
)
from looprun_models.gguf import GgufHeader
from looprun_models.launch import LaunchPlan, SlotFolder, check_memory, plan_launch
from looprun_models.machine import Machine
from looprun_models.registry import LocalModelSpec, resolve_alias
from looprun_models.request import RESERVED, Options, Request, read_request
from looprun_models.settings import load_settings
from looprun_models.weights import weights_path
from tests.fake_engine import help_page

GB, GIB, MIB = 10**9, 1 << 30, 1 << 20
MODEL = Path("/models/model.gguf")
SLOTS = Path("/cache/slot-states")
COMMAND = "/opt/llama/llama-server"


def header(**changed: Any) -> GgufHeader:
    """The 35B-A3B as published: 40 layers, every fourth with full attention, an MTP block after them."""
    values: dict[str, Any] = {
        "path": MODEL, "file_size": int(11.8 * GB), "version": 3, "architecture": "qwen35moe", "name": "35B",
        "context_length": 262144, "embedding_length": 2048, "block_count": 41, "draft_layers": 1,
        "recurrent_layers": 30, "kv_heads": (2,) * 10, "draft_kv_heads": (2,), "key_length": 256,
        "value_length": 256, "recurrent_layer_bytes": 2_195_456, "expert_layer_bytes": (250 * MIB,) * 41,
        "tensor_bytes": int(11.8 * GB), "data_end": int(11.8 * GB),
    }  # fmt: skip
    return GgufHeader(**{**values, **changed})


HYBRID = header()
HEADLESS = header(draft_layers=0, draft_kv_heads=(), block_count=40)
DENSE = header(
    architecture="llama", file_size=98_362_432, draft_layers=0, draft_kv_heads=(), recurrent_layers=0,
    recurrent_layer_bytes=0, expert_layer_bytes=(), kv_heads=(3,) * 30, key_length=64, value_length=64,
)  # fmt: skip


def engine(**behaviour: Any) -> Engine:
    """An engine whose help is the fake one's, changed by the same words (dialect, help_drop, help_add ...)."""
    told = {key: behaviour.pop(key) for key in list(behaviour) if key == "dialect" or key.startswith("help_")}
    text = help_page(told)
    values: dict[str, Any] = {
        "path": Path(COMMAND), "command": (COMMAND,), "source": "LLAMA_BIN", "build": 11434,
        "version": "version: 11434 (abc)", "flags": parse_flags(text), "help_text": text, "identity": "id:1",
    }  # fmt: skip
    return Engine(**{**values, **behaviour})


def machine(available: float = 64 * GB, **changed: Any) -> Machine:
    values: dict[str, Any] = {
        "system": "Linux", "os_name": "Debian", "arch": "x86_64", "cores": 8, "cpu_quota": None,
        "ram_total": int(available), "ram_available": int(available), "ram_limited_by": "machine",
        "memlock_limit": None,
    }  # fmt: skip
    return Machine(**{**values, **changed})


def spec_of(alias: str, **changed: Any) -> LocalModelSpec:
    return dataclasses.replace(resolve_alias(alias), **changed)


def request_for(spec: LocalModelSpec, options: Options, environ: Mapping[str, str], **identity: Any) -> Request:
    given = {"engine_identity": "id:1", "weights_identity": "w:1", "slot_dir": SLOTS, **identity}
    return read_request(spec, load_settings({"HOME": os.environ["HOME"], **environ}), options, **given)


def plan(
    alias: str | LocalModelSpec = "ram16",
    *flags: str,
    on: Machine | None = None,
    by: Engine | None = None,
    of: GgufHeader | None = HYBRID,
    gpus: tuple[Device, ...] = (),
    slots: SlotFolder | None = None,
    port: int = 8081,
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> LaunchPlan:
    """The plan of a profile with engine flags after `--`; everything else is a roomy machine and a good engine."""
    spec = resolve_alias(alias) if isinstance(alias, str) else alias
    chosen = Options(engine_flags=flags, **options)
    return plan_launch(
        spec, load_settings({"HOME": os.environ["HOME"], **(environ or {})}), chosen,
        request_for(spec, chosen, environ or {}), port=port, engine=by or engine(), model=MODEL, header=of,
        model_origin=weights_path(spec, load_settings(environ or {}))[1],
        machine=on or machine(), devices=gpus, slots=slots or SlotFolder(SLOTS),
    )  # fmt: skip


def values_of(made: LaunchPlan) -> dict[str, tuple[str, ...]]:
    return {flag.words[0]: flag.words[1:] for flag in made.flags}


def origin_of(made: LaunchPlan, name: str) -> str:
    return next(flag.origin for flag in made.flags if name in flag.words)


def refused(kind: type[LooprunError], *args: Any, **kwargs: Any) -> LooprunError:
    with pytest.raises(kind) as raised:
        plan(*args, **kwargs)
    return raised.value


class TestRecipe:
    def test_the_command_line_is_the_measured_recipe(self) -> None:
        made = plan("ram16", as_quoted=True)
        assert made.argv == (
            COMMAND, "-m", str(MODEL), "--host", "127.0.0.1", "--port", "8081",
            "--alias", f"qwen3.6-35b-gguf,qwen3.6-35b-gguf@{made.fingerprint}", "--jinja", "-fa", "on", "-ngl", "99",
            "--load-mode", "mlock", "-np", "1", "-c", "24576", "-ctk", "q8_0", "-ctv", "q8_0", "-ctxcp", "64",
            "--cache-ram", "512", "--slot-save-path", str(SLOTS), "--spec-type", "draft-mtp", "--metrics", "--slots",
            "--cors-origins", "http://127.0.0.1:8081",
        )  # fmt: skip
        assert made.command_line == " ".join(made.argv)

    def test_a_plain_profile_does_not_draft(self) -> None:
        assert "--spec-type" not in plan("smoke", of=DENSE).argv

    @pytest.mark.parametrize(
        ("dialect", "words"),
        [
            ("old", ("--mlock", "--no-mmap")),
            ("deprecated", ("--load-mode", "mlock")),
            ("new", ("--load-mode", "mlock")),
        ],
    )
    def test_locked_in_ram_is_said_in_the_words_of_the_build(self, dialect: str, words: tuple[str, ...]) -> None:
        made = plan(by=engine(dialect=dialect))
        locks = [word for word in made.argv if word in ("--mlock", "--no-mmap", "--load-mode", "mlock")]
        assert tuple(locks) == words
        assert origin_of(made, words[0]) == "engine dialect"

    def test_every_flag_says_why_it_stands(self) -> None:
        assert all(flag.reason and flag.origin for flag in plan().flags)

    def test_the_first_alias_is_the_served_id_even_when_sorted(self) -> None:
        (aliases,) = values_of(plan())["--alias"]
        assert sorted(aliases.split(","))[0] == "qwen3.6-35b-gguf"

    def test_without_a_slot_folder_the_flag_is_left_out_and_it_is_said(self) -> None:
        made = plan(slots=SlotFolder(None, "LLAMA_SLOT_SAVE_PATH is empty, which turns it off"))
        assert "--slot-save-path" not in made.argv
        assert (
            "trunk states are not kept over restarts: LLAMA_SLOT_SAVE_PATH is empty, which turns it off" in made.notes
        )

    def test_the_record_says_what_was_planned(self) -> None:
        made = plan("ram16", as_quoted=True)
        fields = made.record_fields()
        assert fields["summary"] == "ctx 24576, KV q8_0, RAM cache 512 MiB, draft-mtp"
        assert (fields["alias"], fields["served_id"]) == ("qwen3.6-35b-ram16", "qwen3.6-35b-gguf")
        assert (fields["model_path"], fields["model_size"]) == (str(MODEL), HYBRID.file_size)
        assert fields["fingerprint"] == made.fingerprint


class TestOrigins:
    def test_the_profiles_values(self) -> None:
        made = plan("ram16", as_quoted=True)
        profile = ("-m", "--port", "--alias", "-fa", "-ngl", "-np", "-c", "-ctk", "-ctv", "-ctxcp", "--cache-ram",
            "--spec-type")  # fmt: skip
        assert {name: origin_of(made, name) for name in profile} == dict.fromkeys(profile, "profile")
        looprun = ("--host", "--jinja", "--slot-save-path", "--metrics", "--slots", "--cors-origins")
        assert {name: origin_of(made, name) for name in looprun} == dict.fromkeys(looprun, "looprun")

    @pytest.mark.parametrize(
        ("variable", "value", "flag"),
        [
            ("LLAMA_CTX", "8192", "-c"),
            ("LLAMA_KV", "f16", "-ctk"),
            ("LLAMA_KV", "f16", "-ctv"),
            ("LLAMA_CACHE_RAM", "4000", "--cache-ram"),
            ("LLAMA_SPEC_TYPE", "ngram-mod", "--spec-type"),
        ],
    )
    def test_a_variable_wins_over_the_profile(self, variable: str, value: str, flag: str) -> None:
        made = plan(environ={variable: value})
        assert values_of(made)[flag] == (value,)
        assert origin_of(made, flag) == f"variable {variable}"

    def test_paths_and_port_from_variables_say_so(self) -> None:
        variables = {"LLAMA_PORT": "9000", "LLAMA_SLOT_SAVE_PATH": str(SLOTS), "QWEN36_35B_GGUF": str(MODEL)}
        made = plan(environ=variables, port=9000)
        assert origin_of(made, "--port") == "variable LLAMA_PORT"
        assert origin_of(made, "--slot-save-path") == "variable LLAMA_SLOT_SAVE_PATH"
        assert origin_of(made, "-m") == "variable QWEN36_35B_GGUF"

    def test_an_option_wins_over_a_variable_and_a_free_port_is_ours(self) -> None:
        assert origin_of(plan(environ={"LLAMA_PORT": "9000"}, port=9001), "--port") == "looprun"
        made = plan(environ={"LLAMA_PORT": "9000"}, port=9000, host="0.0.0.0", api_key="k")
        assert origin_of(made, "--host") == "option"
        spec, chosen = resolve_alias("ram16"), Options(port=9000)
        asked = plan_launch(
            spec, load_settings(), chosen, request_for(spec, chosen, {}), port=9000, engine=engine(), model=MODEL,
            header=None, machine=machine(), slots=SlotFolder(SLOTS),
        )  # fmt: skip
        assert origin_of(asked, "--port") == "option"

    def test_drafts_are_turned_off_by_an_empty_variable_and_by_none(self) -> None:
        for made in (plan(environ={"LLAMA_SPEC_TYPE": ""}), plan("ram16", "--spec-type", "none")):
            assert "--spec-type" not in made.argv

    @pytest.mark.parametrize(
        ("words", "flag", "value"),
        [
            (("-c", "8192"), "-c", "8192"),
            (("--ctx-size=8192",), "-c", "8192"),
            (("-ctk", "f16"), "-ctk", "f16"),
            (("--cache-type-v", "f16"), "-ctv", "f16"),
            (("-ctxcp", "9"), "-ctxcp", "9"),
            (("--swa-checkpoints", "9"), "-ctxcp", "9"),
            (("-cram", "4000"), "--cache-ram", "4000"),
            (("--spec-type", "ngram-mod"), "--spec-type", "ngram-mod"),
            (("-ngl", "0"), "-ngl", "0"),
            (("-fa", "auto"), "-fa", "auto"),
            (("-np", "2"), "-np", "2"),
            (("-t", "3"), "-t", "3"),
        ],
    )
    def test_recipe_flags_after_the_dashes_enter_the_plan(self, words: tuple[str, ...], flag: str, value: str) -> None:
        made = plan("ram16", *words, environ={"LLAMA_CTX": "4096", "LLAMA_CACHE_RAM": "1000", "LLAMA_KV": "q8_0"})
        assert made.argv.count(flag) == 1
        assert values_of(made)[flag] == (value,)
        assert origin_of(made, flag) == "option"

    def test_an_overridden_context_counts_in_the_memory_and_the_identity(self) -> None:
        long, short = plan("ram16"), plan("ram16", "-c", "8192")
        assert long.fit is not None
        assert short.fit is not None
        assert short.ctx == 8192
        assert short.fit.kv < long.fit.kv
        assert short.fingerprint != long.fingerprint

    def test_a_profiles_own_engine_flags_lose_to_variables_and_are_the_profiles(self) -> None:
        spec = spec_of("ram16", engine_flags=("-t", "4", "-c", "16384", "--rpc", "box:50052"))
        made = plan(spec)
        assert values_of(made)["-c"] == ("16384",)
        assert {origin_of(made, name) for name in ("-c", "-t", "--rpc")} == {"profile"}
        changed = plan(spec, "-ncmoe", "2", environ={"LLAMA_CTX": "8192"})
        assert values_of(changed)["-c"] == ("8192",)
        assert origin_of(changed, "-c") == "variable LLAMA_CTX"
        assert (origin_of(changed, "--rpc"), origin_of(changed, "-ncmoe")) == ("profile", "option")


class TestEngineFlags:
    def test_others_pass_through_as_they_stand(self) -> None:
        made = plan("ram16", "--rpc", "10.0.0.2:50052", "-ncmoe", "12", "-b", "512")
        assert made.argv[-6:] == ("--rpc", "10.0.0.2:50052", "-ncmoe", "12", "-b", "512")
        assert made.flags[-1].origin == "option"

    @pytest.mark.parametrize("flag", RESERVED)
    def test_what_the_manager_decides_is_refused_with_the_way_to_change_it(self, flag: str) -> None:
        error = refused(ReservedFlag, "ram16", flag, "x")
        assert error.message == f"engine flag {flag} is decided by looprun and cannot be passed on."
        assert error.hint == RESERVED[flag]
        assert error.exit_code == 2

    def test_a_joined_value_does_not_hide_a_reserved_flag(self) -> None:
        refused(ReservedFlag, "ram16", "--port=9000")

    @pytest.mark.parametrize(
        ("words", "accepted"),
        [
            (("-c", "0"), "a whole number, 256 or more"),
            (("-c", "8k"), "a whole number, 256 or more"),
            (("--cache-ram", "-1"), "a whole number, 0 or more"),
            (("-ctk", "q4_0"), "q8_0 or f16"),
            (("-np", "0"), "a whole number, 1 or more"),
            (("-c",), "a value after it"),
        ],
    )
    def test_a_bad_value_is_a_bad_setting(self, words: tuple[str, ...], accepted: str) -> None:
        error = refused(BadSetting, "ram16", *words)
        assert error.message.startswith(f"{words[0]}=")
        assert f"it takes {accepted}." in error.message
        assert words[0] in error.hint

    def test_a_flag_that_the_engine_does_not_know_is_the_users_mistake(self) -> None:
        error = refused(UsageError, "ram16", "--zebra", "1")
        assert str(error) == (
            f"the engine b11434 ({COMMAND}) does not know the flag --zebra.\n"
            f"  next: {COMMAND} --help lists what it takes"
        )
        assert error.exit_code == 2

    def test_numbers_below_zero_are_values(self) -> None:
        by = engine(help_add=["--seed N                                seed"])
        assert plan("ram16", "--seed", "-1", by=by).argv[-2:] == ("--seed", "-1")


class TestRefusals:
    @pytest.mark.parametrize("flag", ["-ctxcp", "--cache-ram", "--metrics", "--jinja", "--slot-save-path"])
    def test_a_flag_that_the_engine_lacks_is_named_with_build_and_mend(self, flag: str) -> None:
        error = refused(EngineTooLittle, by=engine(help_drop=[flag], build=9800))
        assert error.message.startswith(f"the engine b9800 ({COMMAND}) lacks {flag}, which the recipe needs (")
        assert error.hint == (
            'looprun engine install   (or pip install "looprun-models[embedded]", '
            "or set LLAMA_BIN to a llama-server from b9780 on)"
        )
        assert error.exit_code == 4

    def test_a_removed_flag_is_a_lacking_flag(self) -> None:
        error = refused(EngineTooLittle, by=engine(help_removed=["--mlock"], dialect="old", build=None))
        assert f"the engine build unknown ({COMMAND}) lacks --mlock" in error.message

    def test_a_draft_type_that_the_engine_does_not_know(self) -> None:
        error = refused(EngineTooLittle, environ={"LLAMA_SPEC_TYPE": "draft"})
        assert "does not know --spec-type draft (variable LLAMA_SPEC_TYPE)" in error.message
        assert "LLAMA_SPEC_TYPE=''" in error.hint

    def test_drafting_without_a_head_in_the_file_gives_the_command_without(self) -> None:
        error = refused(WeightsBad, of=HEADLESS)
        assert str(error) == (
            f"{MODEL} has no MTP head, and qwen3.6-35b-ram16 asks for draft-mtp (profile).\n"
            "  next: serve it without drafts: LLAMA_SPEC_TYPE='' looprun models serve qwen3.6-35b-ram16"
        )
        assert error.exit_code == 4
        assert "--spec-type" not in plan(of=HEADLESS, environ={"LLAMA_SPEC_TYPE": ""}).argv

    @pytest.mark.parametrize(
        ("make", "name"),
        [
            ({"environ": {"LLAMA_CACHE_RAM": "0"}}, "LLAMA_CACHE_RAM"),
            ({"flags": ("--cache-ram", "0")}, "--cache-ram"),
            ({"profile": 0}, "cache_ram_mib of qwen3.6-35b-ram16"),
        ],
    )
    def test_no_ram_cache_on_a_hybrid_is_refused_by_the_name_it_was_given(
        self, make: dict[str, Any], name: str
    ) -> None:
        spec = spec_of("ram16", **({"cache_ram_mib": 0} if "profile" in make else {}))
        error = refused(BadSetting, spec, *make.get("flags", ()), environ=make.get("environ"))
        assert error.message.startswith(f"{name}='0' cannot be used: it takes 1 MiB or more for a hybrid model")
        assert error.hint == f"change or unset {name}"

    def test_no_ram_cache_is_fine_for_a_dense_model(self) -> None:
        assert values_of(plan("smoke", of=DENSE, environ={"LLAMA_CACHE_RAM": "0"}))["--cache-ram"] == ("0",)

    @pytest.mark.parametrize("word", ["off", "0", "false", "disabled"])
    def test_a_quantized_cache_needs_flash_attention(self, word: str) -> None:
        error = refused(BadSetting, "ram16", "-fa", word)
        assert "on, while the KV cache is q8_0 (or set LLAMA_KV=f16)" in error.message
        assert values_of(plan("ram16", "-fa", word, environ={"LLAMA_KV": "f16"}))["-fa"] == (word,)


class TestIdentity:
    def test_the_same_inputs_give_the_same_fingerprint(self) -> None:
        assert plan().fingerprint == plan().fingerprint
        assert len(plan().fingerprint) == 12

    def test_port_host_key_and_machine_do_not_change_it(self) -> None:
        base = plan().fingerprint
        assert plan(port=9000).fingerprint == base
        assert plan(host="0.0.0.0", api_key="k").fingerprint == base
        assert plan(on=machine(20 * GB, cpu_quota=2.0)).fingerprint == base

    def test_saying_the_profiles_value_by_variable_or_option_is_the_same_server(self) -> None:
        assert plan(environ={"LLAMA_CTX": "24576"}).fingerprint == plan("ram16", "-c", "24576").fingerprint
        assert plan(environ={"LLAMA_CTX": "24576"}).fingerprint == plan().fingerprint

    @pytest.mark.parametrize(
        "changed",
        [
            {"environ": {"LLAMA_CTX": "8192"}},
            {"environ": {"LLAMA_KV": "f16"}},
            {"environ": {"LLAMA_CACHE_RAM": "600"}},
            {"environ": {"LLAMA_SPEC_TYPE": ""}},
            {"options": Options(engine_flags=("-b", "512"))},
            {"options": Options(engine_flags=("-ngl", "0"))},
            {"options": Options(as_quoted=True)},
            {"engine_identity": "id:2"},
            {"weights_identity": "w:2"},
            {"slot_dir": None},
        ],
    )
    def test_everything_that_makes_another_server_changes_it(self, changed: dict[str, Any]) -> None:
        given = dict(changed)
        spec, options = resolve_alias("ram16"), given.pop("options", Options())
        request = request_for(spec, options, given.pop("environ", {}), **given)
        assert request.fingerprint != request_for(spec, Options(), {}).fingerprint

    def test_profiles_with_one_file_and_other_values_differ(self) -> None:
        assert plan("ram16").fingerprint != plan("ram24").fingerprint


class TestEnvironment:
    def test_a_key_travels_in_the_environment_and_nowhere_else(self) -> None:
        made = plan(api_key="s3cret")
        assert made.env["LLAMA_API_KEY"] == "s3cret"
        assert made.api_key == made.record_fields()["api_key"] == "s3cret"
        for shown in (made.argv, made.command_line, repr(made.flags), repr(made.notes)):
            assert "s3cret" not in shown

    def test_an_engine_that_cannot_close_cors_gets_a_key(self) -> None:
        open_engine = engine(help_drop=["--cors-origins"])
        made = plan(by=open_engine, spare_key="spare")
        assert (made.api_key, made.env["LLAMA_API_KEY"]) == ("spare", "spare")
        assert "--cors-origins" not in made.argv
        assert plan(by=open_engine, spare_key="spare", api_key="mine").api_key == "mine"

    def test_an_engine_that_closes_cors_needs_none(self) -> None:
        made = plan(spare_key="spare", port=9000)
        assert made.api_key is None
        assert "LLAMA_API_KEY" not in made.env
        assert values_of(made)["--cors-origins"] == ("http://127.0.0.1:9000",)
        assert plan(by=engine(help_drop=["--cors-origins"])).api_key is None

    def test_what_would_change_the_engine_is_kept_from_it_and_told(self) -> None:
        made = plan(environ={"LLAMA_ARG_HOST": "0.0.0.0", "LLAMA_API_KEY": "x", "AIP_MODE": "P", "CUDA_X": "1"})
        assert not {"LLAMA_ARG_HOST", "LLAMA_API_KEY", "AIP_MODE"} & set(made.env)
        assert made.env["CUDA_X"] == "1"
        assert "kept from the engine: AIP_MODE, LLAMA_API_KEY, LLAMA_ARG_HOST (the recipe decides)" in made.notes

    def test_a_machine_wide_engine_config_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path = Path("/etc/llama.cpp/config.ini")
        monkeypatch.setattr("looprun_models.launch.system_config", lambda settings: path)
        assert f"{path} exists; it can change what the recipe does not set" in plan().notes

    def test_the_loaders_path_is_set_where_it_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "linux")
        assert "LD_LIBRARY_PATH" not in plan().env
        assert plan(by=engine(library_path=True)).env["LD_LIBRARY_PATH"] == "/opt/llama"
        monkeypatch.setattr(sys, "platform", "darwin")
        mac = machine(system="Darwin", arch="arm64")
        assert plan(on=mac).env["DYLD_FALLBACK_LIBRARY_PATH"] == "/opt/llama:/usr/local/lib:/usr/lib"
        assert "DYLD_FALLBACK_LIBRARY_PATH" not in plan(on=mac, by=engine(embedded=True)).env


class TestMachine:
    def test_a_cpu_quota_limits_the_threads(self) -> None:
        made = plan(on=machine(cores=16, cpu_quota=2.5))
        assert values_of(made)["-t"] == ("2",)
        flag = next(flag for flag in made.flags if flag.words[0] == "-t")
        assert (flag.origin, flag.reason) == ("fitted", "the CPU quota is 2.5 of 16 visible cores")

    def test_without_a_quota_the_engine_counts_for_itself(self) -> None:
        assert "-t" not in plan(on=machine(cores=16)).argv

    def test_chosen_threads_are_kept_over_a_quota(self) -> None:
        assert values_of(plan("ram16", "-t", "7", on=machine(cores=16, cpu_quota=2.0)))["-t"] == ("7",)

    def test_a_low_locked_memory_limit_is_told(self) -> None:
        made = plan(on=machine(memlock_limit=8 * MIB))
        note = next(note for note in made.notes if "locked-memory" in note)
        assert note.startswith(
            "the locked-memory limit is 8.0 MiB, the weights take 10.99 GiB: they will not be locked"
        )
        assert "ulimit -l" in note
        assert not [note for note in plan(on=machine(memlock_limit=20 * GIB)).notes if "locked-memory" in note]

    def test_a_gpu_profile_on_a_processor_is_told(self) -> None:
        told = "the profile was measured on a GPU; this engine has none and runs on the CPU, which is much slower"
        assert told in plan().notes
        assert told not in plan(gpus=(Device("CUDA0", 24 * GIB, 23 * GIB),)).notes
        assert told not in plan(on=machine(system="Darwin", arch="arm64")).notes
        assert told not in plan("smoke", of=DENSE).notes

    def test_an_unknown_build_is_told(self) -> None:
        made = plan(by=engine(build=None, note="its build number is unknown; its flags were checked instead"))
        assert f"engine {COMMAND}: its build number is unknown; its flags were checked instead" in made.notes

    def test_without_weights_the_plan_can_be_looked_at(self) -> None:
        made = plan(of=None)
        assert made.fit is None
        assert values_of(made)["-ctxcp"] == ("64",)
        assert made.notes[0].startswith("the weights are not here yet")
        check_memory(made, [])


class TestFit:
    def test_the_published_shape_gives_the_published_sizes(self) -> None:
        assert round(HYBRID.recurrent_bytes / MIB, 1) == 62.8
        assert HYBRID.kv_bytes(1, "f16") == 20 * 1024
        assert HYBRID.checkpoint_bytes(8192, drafting=False) == HYBRID.recurrent_bytes

    def test_a_quoted_cache_that_keeps_nothing_is_fitted_with_its_arithmetic(self) -> None:
        made = plan("ram16")
        assert made.fit is not None
        assert origin_of(made, "-ctxcp") == "fitted (quoted 64)"
        assert origin_of(made, "--cache-ram") == "fitted (quoted 512)"
        assert 3 <= int(values_of(made)["-ctxcp"][0]) <= 6
        assert made.fit.keeps_switches
        assert made.fit.verdict == "fits"
        first, second = made.notes[:2]
        assert first.startswith("context checkpoints 64 -> 6: each holds the whole recurrent state, and the quoted 512")
        assert second.startswith("RAM prompt cache 512 -> ")
        assert f"MiB: 2 agents of {made.fit.entry / MIB:.0f} MiB each" in second

    def test_as_quoted_keeps_the_quotation_and_warns(self) -> None:
        made = plan("ram16", as_quoted=True)
        assert (values_of(made)["-ctxcp"], values_of(made)["--cache-ram"]) == (("64",), ("512",))
        assert any("switching agents reads the prompt anew" in note for note in made.notes)
        assert not any("->" in note for note in made.notes)

    def test_explicit_values_are_never_changed_only_warned_about(self) -> None:
        made = plan("ram16", "-ctxcp", "64", environ={"LLAMA_CACHE_RAM": "512"}, on=machine(14 * GB))
        assert (values_of(made)["-ctxcp"], values_of(made)["--cache-ram"]) == (("64",), ("512",))
        (warning,) = [note for note in made.notes if note.startswith("the RAM prompt cache (512 MiB) holds less")]
        assert "LLAMA_CACHE_RAM=" in warning

    def test_a_fixed_cache_leaves_the_checkpoints_to_be_fitted(self) -> None:
        made = plan("ram16", environ={"LLAMA_CACHE_RAM": "700"})
        assert values_of(made)["--cache-ram"] == ("700",)
        assert int(values_of(made)["-ctxcp"][0]) < 64

    def test_a_dense_model_keeps_its_quoted_values(self) -> None:
        made = plan("smoke", of=DENSE)
        assert (values_of(made)["-ctxcp"], values_of(made)["--cache-ram"]) == (("64",), ("512",))

    def test_the_arithmetic_adds_up(self) -> None:
        fit = plan("ram16").fit
        assert fit is not None
        parts = fit.weights + fit.kv + fit.recurrent + fit.checkpoints + fit.cache + fit.overhead
        assert parts == fit.total
        assert fit.weights == HYBRID.file_size
        assert fit.kv == HYBRID.kv_bytes(24576, "q8_0") + HYBRID.draft_kv_bytes(24576)
        assert fit.recurrent == 4 * HYBRID.recurrent_bytes  # one live state, and one for each token of a draft
        assert fit.arithmetic().endswith(f"= {fit.total / GIB:.2f} GiB of 59.60 GiB available: fits")
        plain = plan("ram16", environ={"LLAMA_SPEC_TYPE": ""}).fit
        assert plain is not None
        assert plain.recurrent == HYBRID.recurrent_bytes

    @pytest.mark.parametrize(
        ("available", "verdict"), [(64 * GB, "fits"), (15.4 * GB, "tight"), (12 * GB, "does not fit")]
    )
    def test_the_verdict_follows_the_memory(self, available: float, verdict: str) -> None:
        fit = plan("ram16", on=machine(available)).fit
        assert fit is not None
        assert fit.verdict == verdict

    def test_a_large_cache_is_kept_within_the_memory_there_is(self) -> None:
        made = plan("ram24", on=machine(22 * GB))
        assert made.fit is not None
        cache = int(values_of(made)["--cache-ram"][0])
        assert cache < 16384
        assert made.fit.total <= 22 * GB
        assert made.fit.verdict == "tight"
        assert any(f"16384 -> {cache} MiB: kept within the memory there is" in note for note in made.notes)

    def test_what_does_not_fit_names_the_way_out_and_who_holds_memory(self) -> None:
        made = plan("ram16", on=machine(12 * GB))
        other = "smollm2-135m (pid 4711) runs: looprun models stop smollm2-135m"
        with pytest.raises(NotEnoughMemory) as raised:
            check_memory(made, [other], smaller="qwen3.5-4b-ram8")
        assert made.fit is not None
        lines = str(raised.value).splitlines()
        assert lines[0] == (
            f"qwen3.6-35b-ram16 does not fit: it takes {made.fit.total / GIB:.2f} GiB and 11.18 GiB are available."
        )
        assert lines[1] == f"  {made.fit.arithmetic()}"
        assert lines[2] == f"  {other}"
        assert lines[3] == (
            "  next: a smaller tier: looprun models serve qwen3.5-4b-ram8; or a shorter context: LLAMA_CTX=8192; or "
            "start it all the same: --force"
        )
        assert raised.value.exit_code == 4

    def test_the_smallest_tier_with_a_short_context_has_one_way_out(self) -> None:
        made = plan("ram8", environ={"LLAMA_CTX": "8192"}, on=machine(1 * GB))
        with pytest.raises(NotEnoughMemory) as raised:
            check_memory(made, [])
        assert raised.value.hint == "start it all the same: --force"

    def test_what_fits_is_not_refused(self) -> None:
        check_memory(plan("ram16"), [])


class TestGpu:
    def test_a_gpu_with_room_takes_all_of_it(self) -> None:
        made = plan(gpus=(Device("CUDA0", 24 * GIB, 23 * GIB),))
        assert "-ncmoe" not in made.argv
        assert made.fit is not None
        assert (made.fit.weights, made.fit.kv) == (0, 0)

    def test_a_small_gpu_gets_a_number_of_layers_whose_experts_stay_in_memory(self) -> None:
        made = plan(gpus=(Device("CUDA0", 8 * GIB, 8 * GIB),))
        assert made.fit is not None
        count = int(values_of(made)["-ncmoe"][0])
        assert (count - 1) * 250 * MIB < made.fit.gpu_need - 8 * GIB <= count * 250 * MIB
        assert made.fit.weights == count * 250 * MIB
        assert origin_of(made, "-ncmoe") == "fitted"
        assert any(note.endswith(f"makes up for it (-ncmoe {count})") for note in made.notes)

    def test_the_count_includes_leading_layers_without_experts(self) -> None:
        leading = header(expert_layer_bytes=(0, 0, *(250 * MIB,) * 39))
        gpus = (Device("CUDA0", 8 * GIB, 8 * GIB),)
        with_dense = int(values_of(plan(of=leading, gpus=gpus))["-ncmoe"][0])
        assert with_dense == int(values_of(plan(gpus=gpus))["-ncmoe"][0]) + 2

    def test_the_users_own_number_stands(self) -> None:
        made = plan("ram16", "-ncmoe", "30", gpus=(Device("CUDA0", 8 * GIB, 8 * GIB),))
        assert made.argv.count("-ncmoe") == 1
        assert made.argv[-2:] == ("-ncmoe", "30")

    def test_a_mac_shares_its_memory(self) -> None:
        mac = machine(24 * GB, system="Darwin", arch="arm64")
        made = plan(on=mac, gpus=(Device("Metal", 16 * GIB, 4 * GIB),))
        assert "-ncmoe" not in made.argv
        assert made.fit is not None
        assert made.fit.weights == HYBRID.file_size
