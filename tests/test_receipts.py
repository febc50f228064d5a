"""Receipts: what comes back, what does not, and that a half-written one is never seen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from looprun_models.receipts import kept_receipt_path, read_receipt, receipt_path, write_receipt, write_whole
from looprun_models.settings import load_settings

FACTS = {"repo": "o/n", "revision": "c" * 40, "size": 4, "sha256": "a" * 64}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "w.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_a_receipt_comes_back_as_it_was_written(target: Path) -> None:
    written = write_receipt(target, repo="o/n", revision="c" * 40, size=4, sha256="a" * 64)
    assert receipt_path(target) == target.with_name("w.gguf.receipt.json")
    assert read_receipt(target) == written
    assert (written.size, written.mtime_ns) == (4, target.stat().st_mtime_ns)
    assert written.date.startswith("20")
    assert written.date.endswith("+00:00")
    assert sorted(path.name for path in target.parent.glob("*w.gguf*")) == ["w.gguf", "w.gguf.receipt.json"]


def test_a_receipt_may_lie_elsewhere(target: Path) -> None:
    at = kept_receipt_path(target, load_settings())
    written = write_receipt(target, repo="", revision="", size=4, sha256="a" * 64, at=at)
    assert read_receipt(target) is None
    assert read_receipt(target, at=at) == written
    assert at != kept_receipt_path(target.with_name("other.gguf"), load_settings())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        json.dumps({"schema": 2, **FACTS, "date": "d", "mtime_ns": 1}).encode(),
        json.dumps({"schema": 1, **FACTS, "date": "d"}).encode(),
        json.dumps({"schema": 1, **FACTS, "date": "d", "mtime_ns": 1, "size": "4"}).encode(),
        json.dumps({"schema": 1, **FACTS, "date": "d", "mtime_ns": True}).encode(),
        json.dumps({"schema": 1, **FACTS, "date": None, "mtime_ns": 1}).encode(),
    ],
)
def test_what_is_no_receipt_of_this_schema_is_none(target: Path, content: bytes) -> None:
    receipt_path(target).write_bytes(content)
    assert read_receipt(target) is None


def test_unknown_facts_of_the_same_schema_are_passed_over(target: Path) -> None:
    facts = {"schema": 1, **FACTS, "date": "d", "mtime_ns": 1, "later": "addition"}
    receipt_path(target).write_text(json.dumps(facts))
    assert read_receipt(target) is not None


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["f"]
