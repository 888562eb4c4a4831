"""The files of the disk tier: private, bounded, and used only if their content matches their name."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import xxhash

from kv_transfer.errors import InvalidOptionError
from kv_transfer.tier.disk.folder import DamagedFileError, WorkerFolder

NUM_BYTES = 64
LAYOUT = "0123456789abcdef"


def _claim(parent: Path, *, layout_hash: str = LAYOUT) -> WorkerFolder:
    return WorkerFolder.claim(parent, layout_hash=layout_hash, block_bytes=NUM_BYTES)


def _write(folder: WorkerFolder, number: int) -> tuple[str, int]:
    content = bytes([number]) * NUM_BYTES
    checksum = xxhash.xxh3_64_intdigest(content)
    name = folder.name_of(b"hash-%d" % number, checksum)
    folder.write(name, memoryview(content))
    os.utime(folder.path / name, ns=(number, number))
    return name, checksum


def _read(folder: WorkerFolder, name: str, checksum: int) -> bytes:
    content = bytearray(NUM_BYTES)
    folder.read(name, checksum, memoryview(content))
    return bytes(content)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    folder = _claim(tmp_path)

    assert _read(folder, *_write(folder, 7)) == bytes([7]) * NUM_BYTES


def test_nobody_else_can_look_at_it(tmp_path: Path) -> None:
    folder = _claim(tmp_path / "cache")
    name, _ = _write(folder, 7)

    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache", folder.path, folder.path / name)]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("damage", ["bit", "cut short", "longer", "empty", "gone", "another's", "a link"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    folder = _claim(tmp_path)
    (name, checksum), (other, _) = _write(folder, 7), _write(folder, 8)
    path, content = folder.path / name, bytes([7]) * NUM_BYTES
    match damage:
        case "bit":
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "cut short":
            path.write_bytes(content[:-1])
        case "longer":
            path.write_bytes(content + b"\0")
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
        case "another's":
            path.write_bytes((folder.path / other).read_bytes())
        case _:
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(DamagedFileError):
        _read(folder, name, checksum)


def test_each_living_worker_has_a_folder_of_its_own_and_the_next_one_takes_it_over(tmp_path: Path) -> None:
    first, second = _claim(tmp_path), _claim(tmp_path)
    name, _ = _write(first, 7)
    first.give_up()

    third = _claim(tmp_path)

    assert (first.path.name, second.path.name, third.path) == ("worker-0", "worker-1", first.path)
    assert [file.name for file in third.keep_newest(9)] == [name]


def test_a_folder_that_is_a_link_to_elsewhere_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "worker-0").symlink_to(tmp_path / "elsewhere")

    assert _claim(tmp_path).path.name == "worker-1"


def test_files_of_earlier_workers_come_in_the_order_of_their_last_use(tmp_path: Path) -> None:
    folder = _claim(tmp_path)
    names = [_write(folder, number)[0] for number in (3, 1, 2)]

    assert [file.name for file in folder.keep_newest(9)] == [names[1], names[2], names[0]]
    assert [file.block_hash for file in folder.keep_newest(9)] == [b"hash-1", b"hash-2", b"hash-3"]


def test_the_bound_holds_from_the_start(tmp_path: Path) -> None:
    folder = _claim(tmp_path)
    for number in range(5):
        _write(folder, number)

    assert [file.block_hash for file in folder.keep_newest(2)] == [b"hash-3", b"hash-4"]
    assert len(list(folder.path.glob("*.kv"))) == 2


def test_what_is_of_no_use_is_deleted_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    other = _claim(tmp_path, layout_hash="f" * 16)
    _write(other, 1)
    other.give_up()
    folder = _claim(tmp_path)
    name, _ = _write(folder, 2)
    (folder.path / f"{name}.tmp").write_bytes(b"unfinished")
    (folder.path / folder.name_of(b"short", 1)).write_bytes(b"short")
    (folder.path / folder.name_of(b"hash-2", 99)).write_bytes(bytes(NUM_BYTES))
    os.utime(folder.path / folder.name_of(b"hash-2", 99), ns=(1, 1))
    (folder.path / "notes.txt").write_text("somebody's")

    assert [file.name for file in folder.keep_newest(9)] == [name]
    assert {path.name for path in folder.path.iterdir()} == {name, "notes.txt", "lock"}


def test_a_path_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    with pytest.raises(InvalidOptionError, match=r"disk_path: .*/file cannot be used"):
        _claim(tmp_path / "file")
