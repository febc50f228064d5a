"""What a saved state depends on besides its tokens: the weights, other files, and whether it may be kept at all."""

from __future__ import annotations

import hashlib
import os
import shlex
from pathlib import Path

from looprun_models.receipts import kept_receipt_path, read_receipt
from looprun_models.settings import Settings
from looprun_models.weights import OK, Weights
from looprun_models.wire import Record

SAMPLES, SAMPLE = 64, 4096
HEADER = 1 << 20


def why_unsaved(record: Record, settings: Settings) -> str:
    """Why no state of this server may be kept, "" when one may."""
    if record.parallel != 1:
        return f"the server has {record.parallel} slots, and a trunk needs to know which is its own"
    if not record.slot_dir:
        return record.slot_note or "the server was started by an older looprun"
    if settings.trunk_budget == 0:
        return "LOOPRUN_TRUNK_BUDGET is 0: nothing is kept"
    if Weights(Path(record.model_path), "", OK).identity != record.weights:
        return f"{record.model_path} was changed since the server was started"
    return ""


def files_of(record: Record) -> str:
    """Adapters and the like that its flags name, as they are now. Raises OSError."""
    named = [word for word in shlex.split(record.state_flags) if os.path.isabs(word)]
    stats = {word: os.stat(word) for word in named if os.path.isfile(word)}
    return " ".join(f"{word}:{stat.st_size}:{stat.st_mtime_ns}" for word, stat in stats.items())


def weights_identity(model: Path, settings: Settings) -> str:
    """The sha256 of a receipt that still fits; without one, of the header, of samples of the tensors, and the size."""
    found = model.stat()
    for at in (None, kept_receipt_path(model, settings)):
        receipt = read_receipt(model, at=at)
        if receipt and (receipt.size, receipt.mtime_ns) == (found.st_size, found.st_mtime_ns):
            return f"sha256:{receipt.sha256}"
    digest = hashlib.sha256(str(found.st_size).encode())
    with model.open("rb") as file:
        digest.update(file.read(HEADER))
        for number in range(SAMPLES):
            file.seek(found.st_size * number // SAMPLES)
            digest.update(file.read(SAMPLE))
        file.seek(-min(SAMPLE, found.st_size), os.SEEK_END)
        digest.update(file.read(SAMPLE))
    return f"sampled:{digest.hexdigest()}"
