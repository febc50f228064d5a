"""Where a profile's GGUF is and whether it is whole. Looks only; fetching is `download`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from looprun_models.errors import LooprunError, WeightsBad, WeightsMissing
from looprun_models.gguf import GgufHeader, read_header
from looprun_models.registry import LocalModelSpec
from looprun_models.settings import Settings

MISSING, PARTIAL, BAD, OK = "missing", "partial", "bad", "ok"


@dataclass(frozen=True, slots=True)
class Weights:
    """A profile's file. state: missing | partial | bad | ok. origin: what decided the path. header only when ok."""

    path: Path
    origin: str
    state: str
    why: str = ""
    header: GgufHeader | None = None

    @property
    def size(self) -> int:
        """Bytes on disk; 0 when there is no file."""
        return self.path.stat().st_size if self.path.is_file() else 0

    @property
    def identity(self) -> str:
        """Changes when the file does: its real path, size and time of change; "" when there is no file."""
        if not self.path.is_file():
            return ""
        stat = self.path.stat()
        return f"{self.path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"


def weights_path(spec: LocalModelSpec, settings: Settings) -> tuple[Path, str]:
    """The path, and what decided it: the profile's own variable, or its default folder."""
    named = settings.model_path(spec.env_var)
    if named:
        return named.absolute(), f"variable {spec.env_var}"
    return spec.default_path(settings), "profile"


def inspect_weights(spec: LocalModelSpec, settings: Settings) -> Weights:
    """Read the header and compare the size with the pin; never the whole file."""
    path, origin = weights_path(spec, settings)
    try:
        header = read_header(path)
        _check(spec, path, header)
    except WeightsMissing:
        return Weights(path, origin, MISSING)
    except WeightsBad as error:
        return Weights(path, origin, BAD, why=error.message)
    return Weights(path, origin, OK, header=header)


def mending_error(spec: LocalModelSpec, weights: Weights) -> LooprunError:
    """What is wrong with weights that are not ok, and the command that mends it."""
    pull = f"looprun models pull {spec.alias}"
    if weights.state == MISSING:
        where = f" (from {weights.origin})" if weights.origin != "profile" else ""
        return WeightsMissing(
            f"the weights of {spec.alias} are not at {weights.path}{where}; they take {spec.approx_size_gb:g} GB.",
            hint=pull + (f"   (or correct {spec.env_var})" if where else ""),
        )
    return WeightsBad(weights.why, hint=f"move {weights.path} away, then: {pull}")


def _check(spec: LocalModelSpec, path: Path, header: GgufHeader) -> None:
    if spec.size_bytes is not None and header.file_size != spec.size_bytes:
        raise WeightsBad(f"{path} has {header.file_size:,} bytes; {spec.alias} pins {spec.size_bytes:,} bytes.")
