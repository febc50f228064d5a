"""Archives that are right, and archives that want to write where they must not."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from looprun_models.errors import InstallFailed
from looprun_models.progress import Progress
from looprun_models.unpack import unpack

Item = tuple[str, bytes | None, dict[str, object]]
"""Name, content (None: none), and what of the entry is otherwise: type, mode, linkname."""


def tar(path: Path, *items: Item) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content, other in items:
            info = tarfile.TarInfo(name)
            info.mode = 0o644
            if content is not None:
                info.size = len(content)
            for key, value in other.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content) if content is not None else None)
    return path


def zipped(path: Path, *items: Item) -> Path:
    types = {tarfile.SYMTYPE: stat.S_IFLNK, tarfile.DIRTYPE: stat.S_IFDIR, tarfile.FIFOTYPE: stat.S_IFIFO}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that come twice, which is the point
        for name, content, other in items:
            kind = next((mode for what, mode in types.items() if what == other.get("type")), stat.S_IFREG)
            info = zipfile.ZipInfo("placeholder")
            info.filename = info.orig_filename = name + ("/" if kind == stat.S_IFDIR else "")
            info.create_system = 3
            info.external_attr = (kind | int(str(other.get("mode", 0o644)))) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, str(other.get("linkname", "")).encode() if kind == stat.S_IFLNK else content or b"")
    return path


FORMS = [pytest.param(tar, id="tar"), pytest.param(zipped, id="zip")]
Make = Callable[..., Path]


def file(name: str, content: bytes = b"x", **other: object) -> Item:
    return name, content, other


def folder(name: str) -> Item:
    return name, None, {"type": tarfile.DIRTYPE, "mode": 0o755}


def link(name: str, to: str) -> Item:
    return name, None, {"type": tarfile.SYMTYPE, "linkname": to}


def twin(name: str, to: str) -> Item:
    return name, None, {"type": tarfile.LNKTYPE, "linkname": to}


def refused(archive: Path, to: Path, *, most_bytes: int = 10**9, most_entries: int = 100) -> str:
    """The message; nothing is written beside the folder, and no link in it leads out."""
    before = set(to.parent.iterdir())
    with pytest.raises(InstallFailed) as caught:
        unpack(archive, to, most_bytes=most_bytes, most_entries=most_entries)
    assert set(to.parent.iterdir()) - before <= {to}
    return caught.value.message


@pytest.mark.parametrize("make", FORMS)
def test_files_links_and_the_right_to_be_run_are_kept(make: Make, tmp_path: Path) -> None:
    archive = make(
        tmp_path / "a",
        folder("llama-b1"),
        file("llama-b1/llama-server", b"program", mode=0o775),
        file("llama-b1/LICENSE", b"words", mode=0o666),
        file("./llama-b1/libllama.so.0.1", b"library", mode=0o755),
        link("llama-b1/libllama.so.0", "libllama.so.0.1"),
        link("llama-b1/libllama.so", "libllama.so.0"),
        file("llama-b1/deeper/x", b""),
        link("llama-b1/deeper/back", "../libllama.so"),
    )
    to = tmp_path / "to"
    unpack(archive, to)
    inside = to / "llama-b1"
    assert (inside / "llama-server").read_bytes() == b"program"
    assert stat.S_IMODE((inside / "llama-server").stat().st_mode) == 0o755
    assert stat.S_IMODE((inside / "LICENSE").stat().st_mode) == 0o644
    assert os.readlink(inside / "libllama.so") == "libllama.so.0"
    assert (inside / "libllama.so").read_bytes() == (inside / "deeper/back").read_bytes() == b"library"
    assert stat.S_IMODE(to.stat().st_mode) == 0o700


def test_a_hard_link_to_a_file_of_the_archive(tmp_path: Path) -> None:
    unpack(tar(tmp_path / "a", file("d/one", b"same"), twin("d/two", "d/one")), tmp_path / "to")
    assert (tmp_path / "to/d/two").read_bytes() == b"same"


def test_progress_is_told_in_bytes_of_the_archive(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a", *(file(f"f{number}", os.urandom(100_000)) for number in range(5)))
    heard: list[Progress] = []
    unpack(archive, tmp_path / "to", heard.append)
    assert {step.phase for step in heard} == {"unpacking"}
    assert {step.total for step in heard} == {archive.stat().st_size}
    assert 0 < heard[0].done <= heard[-1].done <= archive.stat().st_size


BAD: list[tuple[str, list[Item], str, str]] = [
    ("absolute", [file("/etc/evil")], "/etc/evil", "has an absolute name"),
    ("parent", [file("../evil")], "../evil", "has a name that leads outside"),
    ("parent inside", [file("a/../../evil")], "a/../../evil", "has a name that leads outside"),
    ("parent folder", [folder("..")], "..", "has a name that leads outside"),
    ("backslash", [file("..\\evil")], "..\\evil", "has a name that is none on every system"),
    ("drive", [file("C:evil")], "C:evil", "has a name that is none on every system"),
    ("device name", [file("a/NUL.txt")], "a/NUL.txt", "has a name that is none on every system"),
    ("trailing dot", [file("a.")], "a.", "has a name that is none on every system"),
    ("newline", [file("a\nb")], "a\nb", "has a name that is none on every system"),
    ("no name", [file("./")], "./", "has no name"),
    ("link out", [link("l", "../x")], "l", "is a link that leads outside (to '../x')"),
    ("absolute link", [link("l", "/etc/passwd")], "l", "is a link that leads outside"),
    ("deep link out", [link("a/b/l", "../../../x")], "a/b/l", "is a link that leads outside"),
    ("windows link out", [link("l", "..\\x")], "l", "is a link that leads outside"),
    ("empty link", [link("l", "")], "l", "is a link that leads outside"),
    ("link to the top's outside", [link("l", "a/../..")], "l", "is a link that leads outside"),
    ("through links", [link("a/b/up", "../.."), link("a/b/out", "up/..")], "a/b/out", "is a link that leads outside"),
    ("write through a link", [link("l", "."), file("l/x")], "l/x", "clashes with 'l', which is a link"),
    ("a file for a link", [link("l", "x"), file("l")], "l", "clashes with 'l'"),
    ("twice", [file("x"), file("x")], "x", "clashes with 'x'"),
    ("case", [file("d/Read"), file("d/read")], "d/read", "clashes with 'd/Read'"),
    ("case of folders", [file("D/a"), file("d/b")], "d/b", "clashes with 'D', which is a folder"),
    ("accent", [file("caf\u00e9"), file("cafe\u0301")], "cafe\u0301", "clashes with 'caf\u00e9'"),
    ("below a file", [file("x"), file("x/y")], "x/y", "clashes with 'x', which is a file"),
    ("setuid", [file("x", mode=0o4755)], "x", "would run with the rights of another user (setuid)"),
    ("setgid", [file("x", mode=0o2755)], "x", "would run with the rights of another user (setuid)"),
    ("pipe", [("p", None, {"type": tarfile.FIFOTYPE})], "p", "is no file, folder or link"),
]  # fmt: skip
ONLY_TAR: list[tuple[str, list[Item], str, str]] = [
    ("device", [("d", None, {"type": tarfile.CHRTYPE})], "d", "is no file, folder or link"),
    ("disk", [("d", None, {"type": tarfile.BLKTYPE})], "d", "is no file, folder or link"),
    ("hard link out", [twin("h", "/etc/passwd")], "h", "has an absolute name"),
    ("hard link up", [twin("h", "../x")], "h", "has a name that leads outside"),
    ("hard link to nothing", [twin("h", "later"), file("later")], "h", "is a hard link to 'later', which is no file"),
    ("hard link to a link", [link("l", "x"), twin("h", "l")], "h", "is a hard link to 'l', which is no file"),
]


@pytest.mark.parametrize(
    ("make", "items", "name", "why"),
    [pytest.param(tar, *rest, id=f"tar {label}") for label, *rest in [*BAD, *ONLY_TAR]]
    + [pytest.param(zipped, *rest, id=f"zip {label}") for label, *rest in BAD if label != "no name"],
)
def test_a_bad_entry_is_named_and_nothing_gets_out(
    make: Make, items: list[Item], name: str, why: str, tmp_path: Path
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    archive = make(tmp_path / "bad.archive", file("good"), *items)
    told = refused(archive, inside / "to")
    assert told.startswith("bad.archive was not unpacked: its entry ")
    assert f"{name!r} {why}" in told.replace("../'", "..'")  # a folder's name ends with a slash in a zip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.archive", *(["home", "inside"])]


@pytest.mark.parametrize("make", FORMS)
def test_no_more_bytes_than_the_limit(make: Make, tmp_path: Path) -> None:
    archive = make(tmp_path / "a", file("zeros", bytes(5_000_000)), file("more", bytes(5_000_000)))
    assert archive.stat().st_size < 50_000
    told = refused(archive, tmp_path / "to", most_bytes=7_000_000)
    assert "its entry 'more' is too much: more than 7,000,000 bytes in all" in told
    unpack(archive, tmp_path / "enough", most_bytes=10_000_000)


@pytest.mark.parametrize("make", FORMS)
def test_no_more_entries_than_the_limit(make: Make, tmp_path: Path) -> None:
    archive = make(tmp_path / "a", *(file(f"f{number}") for number in range(5)))
    assert "its entry 'f4' is one too many: more than 4" in refused(archive, tmp_path / "to", most_entries=4)


@pytest.mark.parametrize("make", FORMS)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_an_archive_that_is_cut_short(make: Make, kept: float, tmp_path: Path) -> None:
    archive = make(tmp_path / "a.archive", *(file(f"f{number}", os.urandom(50_000)) for number in range(4)))
    whole = archive.read_bytes()
    archive.write_bytes(whole[: int(len(whole) * kept)])
    assert "a.archive is cut short or damaged" in refused(archive, tmp_path / "to")


@pytest.mark.parametrize("make", FORMS)
def test_an_archive_with_a_changed_byte(make: Make, tmp_path: Path) -> None:
    archive = make(tmp_path / "a.archive", file("f", bytes(range(256)) * 400))
    content = bytearray(archive.read_bytes())
    content[len(content) // 3] ^= 0xFF
    archive.write_bytes(content)
    assert "a.archive is cut short or damaged" in refused(archive, tmp_path / "to")


def test_an_encrypted_zip_and_what_is_no_archive(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "a.zip", file("f"))
    content = archive.read_bytes()
    at = content.index(b"PK\x01\x02")
    archive.write_bytes(content[: at + 8] + b"\x01" + content[at + 9 :])
    assert "'f' is encrypted" in refused(archive, tmp_path / "to")
    (tmp_path / "b").write_bytes(b"MZ\x90 a program")
    assert "b is cut short or damaged" in refused(tmp_path / "b", tmp_path / "to2")


def test_a_full_disk_is_no_bad_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        unpack(tar(tmp_path / "a", file("f")), tmp_path / "to")
