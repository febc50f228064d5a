"""Where a profile's GGUF is and whether it is whole. Looks only; fetching is `download`, adopting `adoption`.

A split GGUF (`-00001-of-0000N.gguf`) is one thing here: whole when all its parts are, and as large as all of them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from looprun_models.errors import LooprunError, WeightsBad, WeightsMissing
from looprun_models.gguf import GgufHeader, check_part, read_header
from looprun_models.journal import read_progress
from looprun_models.paths import read_paths
from looprun_models.progress import OnProgress, Progress
from looprun_models.receipts import Receipt, kept_receipt_path, read_receipt
from looprun_models.registry import LocalModelSpec
from looprun_models.settings import Settings

MISSING, PARTIAL, BAD, OK = "missing", "partial", "bad", "ok"
ADOPTED = "paths.toml"
"""The origin of a path that the user's paths.toml names: somebody else's file."""

_FIRST_PART = re.compile(r"^(?P<stem>.+-)0*1-of-(?P<count>\d{1,5})(?P<end>\.gguf)$")
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class Weights:
    """A profile's file. state: missing | partial | bad | ok. origin: what decided the path. header only when ok.

    why says what is bad, or how much of a partial file is here. The header of a split GGUF is its first part's, with
    the bytes of all parts as file_size.
    """

    path: Path
    origin: str
    state: str
    why: str = ""
    header: GgufHeader | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return shard_paths(self.path)

    @property
    def size(self) -> int:
        """Bytes on disk, of all parts; 0 when there is no file."""
        return sum(path.stat().st_size for path in self.paths if path.is_file())

    @property
    def identity(self) -> str:
        """Changes when a file does, or another is put in its place; "" when the first is not there."""
        if not self.path.is_file():
            return ""
        stats = [(path.resolve(), path.stat()) for path in self.paths if path.is_file()]
        return "|".join(f"{path}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}" for path, stat in stats)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a re-hash of one file found. against: "the profile's pin", "the receipt of DATE", "" with nothing known."""

    path: Path
    size: int
    sha256: str
    expected: str | None
    against: str

    @property
    def ok(self) -> bool | None:
        """None when there is nothing to compare with."""
        return self.sha256 == self.expected if self.expected else None


def weights_path(spec: LocalModelSpec, settings: Settings) -> tuple[Path, str]:
    """The path, and what decided it: the profile's own variable, the user's paths.toml, or the profile's folder."""
    named = settings.model_path(spec.env_var)
    if named:
        return named.absolute(), f"variable {spec.env_var}"
    adopted = read_paths(settings)
    for name in (spec.alias, *spec.short):
        if name in adopted:
            return adopted[name], ADOPTED
    return spec.default_path(settings), "profile"


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All parts of the split GGUF that this path is the first part of; else the path alone."""
    match = _FIRST_PART.match(path.name)
    if not match:
        return (path,)
    count, width = int(match["count"]), len(match["count"])
    names = (f"{match['stem']}{number:0{width}d}-of-{match['count']}{match['end']}" for number in range(2, count + 1))
    return (path, *(path.with_name(name) for name in names))


def receipt_of(path: Path, settings: Settings) -> Receipt | None:
    """What was written down of this file, beside it or in our state folder."""
    return read_receipt(path) or read_receipt(path, at=kept_receipt_path(path, settings))


def expectation(spec: LocalModelSpec, path: Path, settings: Settings) -> tuple[int | None, str | None, str]:
    """Size, sha256 and who says so, for one file of a profile: its pin, else the receipt; (None, None, "") else."""
    pins = path.name == spec.file or path == weights_path(spec, settings)[0]
    if pins and (spec.size_bytes is not None or spec.sha256 is not None):
        return spec.size_bytes, spec.sha256, "the profile's pin"
    receipt = receipt_of(path, settings)
    if receipt:
        return receipt.size, receipt.sha256, f"the receipt of {receipt.date[:10]}"
    return None, None, ""


def inspect_weights(spec: LocalModelSpec, settings: Settings) -> Weights:
    """Read the headers and compare sizes with the pin, else the receipt; never the whole file."""
    path, origin = weights_path(spec, settings)
    try:
        header = _inspect(spec, path, settings)
    except WeightsMissing:
        share = _share_there(spec, path)
        if share is None:
            return Weights(path, origin, MISSING)
        return Weights(path, origin, PARTIAL, why=f"{share} %")
    except WeightsBad as error:
        return Weights(path, origin, BAD, why=error.message)
    return Weights(path, origin, OK, header=header)


def mending_error(spec: LocalModelSpec, weights: Weights) -> LooprunError:
    """What is wrong with weights that are not ok, and the command that mends it."""
    pull, remove = f"looprun models pull {spec.alias}", f"looprun models rm {spec.alias}"
    if weights.origin == ADOPTED:
        gone = f"{weights.path}, which {spec.alias} uses by paths.toml, is not there."
        message = weights.why if weights.state == BAD else gone
        kind = WeightsBad if weights.state == BAD else WeightsMissing
        return kind(message, hint=f"{remove}   (forgets that path), then: {pull}")
    if weights.state == PARTIAL:
        return WeightsMissing(
            f"the weights of {spec.alias} are here in part only ({weights.why}), at {weights.path}.",
            hint=f"{pull}   (goes on where it stopped)",
        )
    if weights.state == MISSING:
        where = f" (from {weights.origin})" if weights.origin != "profile" else ""
        return WeightsMissing(
            f"the weights of {spec.alias} are not at {weights.path}{where}; they take {spec.approx_size_gb:g} GB.",
            hint=pull + (f"   (or correct {spec.env_var})" if where else ""),
        )
    if weights.origin != "profile":
        return WeightsBad(weights.why, hint=f"correct or unset {spec.env_var}, which names this file")
    return WeightsBad(weights.why, hint=f"{pull}   (puts the right file in its place; {remove} only removes it)")


def check_pullable(spec: LocalModelSpec, weights: Weights) -> None:
    """Raises WeightsBad or WeightsMissing where a pull would write among another tool's files, or over a user's own."""
    if weights.origin == ADOPTED and weights.state != OK:
        raise mending_error(spec, weights)
    if weights.origin.startswith("variable") and weights.state == BAD and read_receipt(weights.path) is None:
        raise WeightsBad(
            f"{weights.why} It was not fetched by looprun, and a pull would replace it.",
            hint=f"correct or unset {spec.env_var}, or move the file away",
        )


def verify(spec: LocalModelSpec, settings: Settings, on_progress: OnProgress | None = None) -> tuple[Verdict, ...]:
    """Read every byte again and compare with the pin, else the receipt: a verdict for each file.

    Raises WeightsMissing or WeightsBad when there is nothing whole to read.
    """
    found = inspect_weights(spec, settings)
    if found.state != OK:
        raise mending_error(spec, found)
    verdicts = []
    for path in found.paths:
        _, expected, against = expectation(spec, path, settings)
        digest = hash_file(path, on_progress)
        verdicts.append(Verdict(path, path.stat().st_size, digest, expected, against if expected else ""))
    return tuple(verdicts)


def hash_file(path: Path, on_progress: OnProgress | None = None) -> str:
    """The sha256 of a file, in hex. on_progress hears the phase "hashing", in bytes."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if on_progress:
                on_progress(Progress("hashing", done, total))
    return digest.hexdigest()


def _inspect(spec: LocalModelSpec, path: Path, settings: Settings) -> GgufHeader:
    header = read_header(path)
    if spec.architecture and header.architecture != spec.architecture:
        raise WeightsBad(f"{path} is a {header.architecture} model; {spec.alias} is for {spec.architecture}.")
    parts = shard_paths(path)
    if header.shards != len(parts):
        told = f"is the first of {header.shards} parts, which its name does not say"
        raise WeightsBad(f"{path} {told if header.shards > 1 else 'is whole, though its name says that it is a part'}.")
    for part in parts[1:]:
        check_part(part)
    sizes = [part.stat().st_size for part in parts]
    for part, size in zip(parts, sizes, strict=True):
        expected, _, against = expectation(spec, part, settings)
        if expected is not None and size != expected:
            said = f"{spec.alias} pins" if against.endswith("pin") else f"{against} says"
            raise WeightsBad(f"{part} has {size:,} bytes; {said} {expected:,} bytes.")
    return replace(header, file_size=sum(sizes))


def _share_there(spec: LocalModelSpec, path: Path) -> int | None:
    """How much of it is here, in percent and never 100, where a download was begun; None where none was."""
    parts = shard_paths(path)
    begun = [read_progress(part) for part in parts]
    whole = [part.stat().st_size if part.is_file() else 0 for part in parts]
    if not any(begun) and not any(whole):
        return None
    there = sum(whole) + sum(progress[0] for progress, size in zip(begun, whole, strict=True) if progress and not size)
    known = [progress[1] if progress else size for progress, size in zip(begun, whole, strict=True)]
    total = sum(known) if all(known) else max(sum(known), int(spec.approx_size_gb * 1e9))
    return min(99, 100 * there // total) if total else 0
