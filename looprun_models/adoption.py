"""Weights that other tools already have: `find_candidates` looks where they keep them, `adopt` lets a profile use one.

A file is used where it lies, by a line in the user's paths.toml, or gets a second name in the profile's folder by a
hard link. Nothing is ever copied, and the other tool's file is only read. To know another tool, add to `_stores`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from looprun_models.errors import LooprunError, UsageError, WeightsBad
from looprun_models.gguf import read_header
from looprun_models.paths import drop_path, set_path
from looprun_models.progress import OnProgress
from looprun_models.receipts import kept_receipt_path, write_receipt
from looprun_models.registry import LocalModelSpec, load_profiles
from looprun_models.settings import Settings, private_dir
from looprun_models.weights import expectation, hash_file, shard_paths, weights_path

NEAR = 0.05
"""How far a size may be from the profile's approximate one, where nothing exact is known."""
_DIGEST = re.compile(r"(?:sha256-)?([0-9a-f]{64})")
_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)/snapshots/(?P<revision>[^/]+)/")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that could serve a profile. size: bytes of all its parts.

    claim: the sha256 that its name says, where a store names files so; hashing proves it when it is adopted.
    exact: whether it was found by the size or sha256 that is expected. evidence: by what it was found, in words.
    """

    path: Path
    tool: str
    size: int
    claim: str | None
    exact: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """What was done. proof: what the sha256 agrees with, in words; verified: whether a pin or a receipt told it."""

    path: Path
    aliases: tuple[str, ...]
    sha256: str
    proof: str
    verified: bool


def find_candidates(spec: LocalModelSpec, settings: Settings, extra: Path | None = None) -> list[Candidate]:
    """Files of other tools that this profile could use, the surest first; with `extra`, of that file or folder only."""
    own = {path.resolve() for path in (weights_path(spec, settings)[0], spec.default_path(settings))}
    found: dict[Path, Candidate] = {}
    for tool, path in _walk(extra) if extra else _stores(settings):
        real = path.resolve()
        if real in own or real in found:
            continue
        candidate = _match(spec, settings, tool, path)
        if candidate:
            found[real] = candidate
    return sorted(found.values(), key=lambda candidate: (not candidate.exact, candidate.claim is None))


def adopt(
    spec: LocalModelSpec,
    candidate: Candidate,
    settings: Settings,
    *,
    link: bool = False,
    on_progress: OnProgress | None = None,
) -> Adopted:
    """Read the file whole, compare its sha256, and let the profile (and those that name the same file) use it.

    Raises WeightsBad when it is not what is expected; UsageError where the link cannot be made or would have no effect.
    """
    if settings.model_path(spec.env_var):
        raise UsageError(f"{spec.env_var} already names the weights of {spec.alias}.", hint=f"unset {spec.env_var}")
    parts = shard_paths(candidate.path)
    _check_adoptable(spec, candidate, settings, link)
    digests = [hash_file(part, on_progress) for part in parts]
    proof, verified = _prove(spec, candidate, settings, digests[0])
    users = same_file(spec, settings)
    aliases = tuple(user.alias for user in users)
    if link:
        target = spec.default_path(settings)
        _link(parts, shard_paths(target))
        for name in (name for user in users for name in (user.alias, *user.short)):
            drop_path(settings, name)
    else:
        target = candidate.path.absolute()
        private_dir(settings.state_dir, "LOOPRUN_STATE_DIR")
    repo, revision = _source(spec, candidate, settings, digests[0])
    for part, digest in zip(shard_paths(target), digests, strict=True):
        at = None if link else kept_receipt_path(part, settings)
        write_receipt(part, repo=repo, revision=revision, size=part.stat().st_size, sha256=digest, at=at)
    for alias in aliases if not link else ():
        set_path(settings, alias, target)
    return Adopted(target, aliases, digests[0], proof, verified)


def _check_adoptable(spec: LocalModelSpec, candidate: Candidate, settings: Settings, link: bool) -> None:
    """What can be known before a file of gigabytes is read."""
    try:
        str(candidate.path).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{os.fsencode(candidate.path)!r} is not a name in UTF-8, which paths.toml takes.",
            hint="rename the file or its folder",
        ) from None
    target = spec.default_path(settings)
    if not link:
        return
    if os.path.lexists(target):
        raise UsageError(f"{target} is already there.", hint=f"looprun models rm {spec.alias}, then adopt again")
    there = next(folder for folder in target.parents if folder.exists())
    if there.stat().st_dev != candidate.path.stat().st_dev:
        raise UsageError(
            f"{there} is on another file system than {candidate.path}, and a hard link cannot cross.",
            hint="leave --link out: the file is then used where it lies",
        )


def same_file(spec: LocalModelSpec, settings: Settings) -> list[LocalModelSpec]:
    """This profile and the others that name the same file of the same repository, as ram16 and ram24 do."""
    others = load_profiles(settings).values()
    keys = [(other.hf_repo, other.file, other.default_dir, other.env_var) for other in others]
    own = (spec.hf_repo, spec.file, spec.default_dir, spec.env_var)
    same = [other for other, key in zip(others, keys, strict=True) if key == own]
    return same if spec in same else [spec, *same]


def _match(spec: LocalModelSpec, settings: Settings, tool: str, path: Path) -> Candidate | None:
    """By size first, then by sha256; where neither is known, by what name and header say."""
    parts = shard_paths(path)
    if not all(part.is_file() for part in parts) or len(parts) != len(shard_paths(Path(spec.file))):
        return None
    size = sum(part.stat().st_size for part in parts)
    told = _DIGEST.fullmatch(path.resolve().name)
    claim = told[1] if told else None
    expected_size, expected_sha, against = expectation(spec, spec.default_path(settings), settings)
    if expected_size is None and expected_sha is None:
        evidence = _resemblance(spec, path, size, named=not _DIGEST.fullmatch(path.name))
        return Candidate(path, tool, size, claim, False, evidence) if evidence else None
    if expected_size is not None and path.stat().st_size != expected_size:
        return None
    if expected_sha and claim and claim != expected_sha:
        return None
    by_name = bool(expected_sha) and claim == expected_sha
    if expected_size is None and not by_name:  # a digest is pinned, and no size: only a name that is the digest tells
        return None
    if not _usable(spec, path):
        return None
    evidence = f"its name is the sha256 of {against}" if by_name else f"it has the size of {against}"
    return Candidate(path, tool, size, claim, True, evidence)


def _resemblance(spec: LocalModelSpec, path: Path, size: int, *, named: bool) -> str:
    """Why the file may be the profile's: its name where it has one, else the model's name in it and its size."""
    near = abs(size - spec.approx_size_gb * 1e9) <= NEAR * spec.approx_size_gb * 1e9
    if named and path.name != spec.file and not path.name.endswith(f"_{spec.file}"):
        return ""
    if not named and not near:
        return ""
    name = _usable(spec, path)
    if name is None or (not named and not (name and _plain(spec.file).startswith(_plain(name)))):
        return ""
    what = "its name and header" if named else f"its header ({name!r}) and size"
    return f"{what} fit; there is no sha256 to compare with"


def _usable(spec: LocalModelSpec, path: Path) -> str | None:
    """The model's name in the header, when the file is whole and of the profile's kind."""
    try:
        header = read_header(path)
    except LooprunError:
        return None
    if spec.architecture and header.architecture != spec.architecture:
        return None
    if "draft-mtp" in (spec.spec_type or "") and not header.has_draft_head:
        return None
    return header.name


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _prove(spec: LocalModelSpec, candidate: Candidate, settings: Settings, digest: str) -> tuple[str, bool]:
    _, expected, against = expectation(spec, spec.default_path(settings), settings)
    for told, who in ((expected, against), (candidate.claim, "its own name")):
        if told and told != digest:
            raise WeightsBad(
                f"{candidate.path} is not what it should be: {who} says sha256 {told}, its content has {digest}.",
                hint=f"looprun models pull {spec.alias}",
            )
    if expected:
        return f"its sha256 is that of {against}", True
    own_name = "its content agrees with its own name, but " if candidate.claim else ""
    return f"{own_name}nothing tells the sha256 that {spec.alias} should have; this one has {digest}", False


def _source(spec: LocalModelSpec, candidate: Candidate, settings: Settings, digest: str) -> tuple[str, str]:
    """Repository and commit, as far as they are known."""
    if spec.sha256 == digest:
        return spec.hf_repo, spec.revision or ""
    match = _SNAPSHOT.search(candidate.path.absolute().as_posix())
    return (f"{match['owner']}/{match['name']}", match["revision"]) if match else ("", "")


def _link(parts: tuple[Path, ...], targets: tuple[Path, ...]) -> None:
    """Give every part a second name; all or none."""
    made: list[Path] = []
    try:
        targets[0].parent.mkdir(parents=True, exist_ok=True)
        for part, target in zip(parts, targets, strict=True):
            os.link(part.resolve(), target)
            made.append(target)
    except OSError as error:
        for target in made:
            target.unlink(missing_ok=True)
        raise _link_refused(parts[0], targets[0], error) from error


def _link_refused(part: Path, target: Path, error: OSError) -> UsageError:
    if isinstance(error, FileExistsError):
        return UsageError(f"{target} is already there.", hint="remove it first with: looprun models rm ALIAS")
    if error.errno == errno.EXDEV:
        why = f"{target.parent} is on another file system than {part}, and a hard link cannot cross"
    else:
        why = f"{target} cannot be linked to {part}: {error.strerror}"
    return UsageError(f"{why}.", hint="leave --link out: the file is then used where it lies")


def _stores(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Every file of the stores of other tools, with the tool's name."""
    environ, home = settings.environ, settings.expand("~")
    caches = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")

    def folders(*named: str | Path | None) -> list[Path]:
        return list(dict.fromkeys(settings.expand(str(name)) for name in named if name and str(name).strip()))

    hub = environ.get("HF_HOME")
    for folder in folders(
        environ.get("HF_HUB_CACHE"),
        environ.get("HUGGINGFACE_HUB_CACHE"),
        Path(hub) / "hub" if hub else None,
        caches / "huggingface" / "hub",
    ):
        yield from _globbed("Hugging Face cache", folder, "models--*/snapshots/*/**/*.gguf")
    for folder in folders(environ.get("LLAMA_CACHE"), caches / "llama.cpp", home / "Library/Caches/llama.cpp"):
        yield from _globbed("llama.cpp's cache", folder, "*.gguf")
    for folder in folders(home / ".lmstudio/models", home / ".cache/lm-studio/models"):
        yield from _globbed("LM Studio", folder, "**/*.gguf")
    for folder in folders(environ.get("OLLAMA_MODELS"), home / ".ollama/models", "/usr/share/ollama/.ollama/models"):
        yield from _globbed("Ollama", folder, "blobs/sha256-*")


def _globbed(tool: str, folder: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    """A store that is not there, or may not be read, has nothing."""
    try:
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
    except OSError:
        return
    yield from ((tool, path) for path in found)


def _walk(given: Path) -> Iterator[tuple[str, Path]]:
    """A file as it is; of a folder, what looks like weights."""
    if given.is_file():
        yield str(given.parent), given
        return
    for folder, _, names in os.walk(given):
        for name in sorted(names):
            if name.endswith(".gguf") or _DIGEST.fullmatch(name):
                yield str(given), Path(folder) / name
