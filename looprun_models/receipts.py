"""What is known of a file that was fetched or adopted: `write_receipt` puts it down, `read_receipt` finds it again.

A receipt lies beside the file as `<name>.receipt.json`; that of a file which belongs to another tool lies in our state
folder (`at=`), so that nothing of ours is left among its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from looprun_models.settings import Settings

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """One file as it was when its sha256 was computed. size is bytes, date is UTC in ISO form.

    repo and revision are where it came from, "" where that is not known. mtime_ns is the file's time of change then.
    """

    repo: str
    revision: str
    size: int
    sha256: str
    date: str
    mtime_ns: int


def receipt_path(target: Path) -> Path:
    """Beside the file."""
    return target.with_name(f"{target.name}.receipt.json")


def kept_receipt_path(target: Path, settings: Settings) -> Path:
    """In our state folder, for a file whose folder is not ours."""
    name = hashlib.sha256(os.fsencode(target.absolute())).hexdigest()[:24]
    return settings.state_dir / "receipts" / f"{name}.json"


def write_receipt(target: Path, *, repo: str, revision: str, size: int, sha256: str, at: Path | None = None) -> Receipt:
    """Write down what was just verified of `target`, which must be there; the old receipt stays until then."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    receipt = Receipt(repo, revision, size, sha256, date, target.stat().st_mtime_ns)
    write_whole(at or receipt_path(target), json.dumps({"schema": SCHEMA, **asdict(receipt)}, indent=1) + "\n")
    return receipt


def read_receipt(target: Path, *, at: Path | None = None) -> Receipt | None:
    """The receipt of a file; None when there is none, or it is not one that this version can read."""
    try:
        data: Any = json.loads((at or receipt_path(target)).read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            return None
        values = {f.name: data[f.name] for f in fields(Receipt)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    whole = {"size", "mtime_ns"}
    if not all(type(value) is (int if name in whole else str) for name, value in values.items()):
        return None
    return Receipt(**values)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is either the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
