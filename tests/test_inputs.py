"""Paths of every kind become inputs; what cannot be read is told, never raised as a traceback."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard

from pdtrace.errors import UnreadableInput
from pdtrace.inputs import Input, expand, plain_name

TEXT = b"hello\nworld\n"


def content(item: Input) -> bytes:
    with item.open() as stream:
        return stream.read()


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".zst", lambda data: zstandard.ZstdCompressor().compress(data)),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
    ],
)
def test_compression_is_undone_by_content_not_by_name(tmp_path: Path, suffix: str, pack) -> None:
    for name in (f"a.txt{suffix}", "plain.txt"):
        (tmp_path / name).write_bytes(pack(TEXT))
        item = next(i for i in expand([str(tmp_path)]) if i.path.endswith(name))
        assert content(item) == TEXT
        assert item.head().data == TEXT
        assert item.head().complete


def test_concatenated_gzip_and_zstd_members_are_read_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(TEXT) * 2)
    (tmp_path / "b.zst").write_bytes(zstandard.ZstdCompressor().compress(TEXT) * 2)
    for item in expand([str(tmp_path)]):
        assert content(item) == TEXT * 2


def test_members_of_zip_and_tar_are_inputs_of_their_own(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x/one.log", TEXT)
        archive.writestr("two.log.gz", gzip.compress(TEXT))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("one.log", "../../escape.log", "/abs.log"):
            info = tarfile.TarInfo(name)
            info.size = len(TEXT)
            archive.addfile(info, io.BytesIO(TEXT))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    (tmp_path / "b.tar.gz").write_bytes(buffer.getvalue())
    inputs = expand([str(tmp_path)])
    assert [i.path.rpartition("/a.zip")[2] for i in inputs if "a.zip" in i.path] == [
        "!two.log.gz",
        "!x/one.log",
    ]
    assert len([i for i in inputs if "b.tar.gz" in i.path]) == 3
    assert all(content(i) == TEXT for i in inputs)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zip", "b.tar.gz"]


def test_a_broken_archive_is_an_input_with_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04" + b"garbage" * 100)
    (tmp_path / "b.gz").write_bytes(gzip.compress(os.urandom(200_000))[:1000])
    broken, cut = expand([str(tmp_path)])
    assert "cannot be read" in broken.problem
    assert 0 < len(cut.head().data) < 1000
    assert "end" in cut.damage


def test_inputs_are_numbered_by_path_and_given_once(tmp_path: Path) -> None:
    for name in ("b.log", "a.log"):
        (tmp_path / name).write_bytes(TEXT)
    one = expand([str(tmp_path / "b.log"), str(tmp_path), str(tmp_path / "*.log")])
    assert [(i.number, i.name) for i in one] == [(0, "a.log"), (1, "b.log")]


def test_missing_paths_and_empty_globs_are_told(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match="no such file"):
        expand([str(tmp_path / "nothing")])
    with pytest.raises(UnreadableInput, match="no file matches"):
        expand([str(tmp_path / "*.nothing")])


def test_special_files_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (item,) = expand([str(tmp_path)])
    assert item.problem == "not a regular file"


def test_the_time_in_a_gzip_header_beats_the_file_time(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=1_700_000_000) as stream:
        stream.write(TEXT)
    (tmp_path / "a.gz").write_bytes(buffer.getvalue())
    assert expand([str(tmp_path)])[0].mtime_ns == 1_700_000_000 * 10**9


def test_names_lose_archive_and_compression() -> None:
    assert plain_name("logs/run.tar.gz!x/server.log.gz") == "server.log"
    assert plain_name("logs/traces.jsonl.zst") == "traces.jsonl"


@pytest.mark.parametrize(
    "text",
    [
        b'\x1b[32m{"a": 1}\x1b[0m\n\x1b[32m{"a": 2}\x1b[0m\n',
        b'{"a": 1}\x1b[0m\n{"a": 2}\x1b[0m\n',
        b'\x1b[1;39m{\x1b[0m\x1b[34;1m"a"\x1b[0m: 1}\n{"a": 2}\n',
    ],
)
def test_json_in_terminal_colours_is_read_without_them(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    (item,) = expand([str(path)])
    assert content(item) == b'{"a": 1}\n{"a": 2}\n'
    assert item.head().data == b'{"a": 1}\n{"a": 2}\n'


def test_colours_are_taken_out_also_where_two_pieces_meet(tmp_path: Path) -> None:
    line = b'\x1b[38;5;208m{"a": "' + b"x" * 1000 + b'"}\x1b[0m\n'
    (tmp_path / "a.jsonl").write_bytes(line * 1000)
    (item,) = expand([str(tmp_path)])
    assert content(item) == (b'{"a": "' + b"x" * 1000 + b'"}\n') * 1000


def test_logs_in_colours_are_left_to_their_readers(tmp_path: Path) -> None:
    text = b"\x1b[36m(EngineCore pid=1)\x1b[0m INFO {ready}\n\x1b[1m[2026-01-01]\x1b[0m\n"
    (tmp_path / "a.log").write_bytes(text)
    (item,) = expand([str(tmp_path)])
    assert content(item) == text


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
@pytest.mark.parametrize("lines", [50, 20_000])
def test_what_is_there_of_a_cut_member_of_a_tar_is_read(
    tmp_path: Path, suffix: str, lines: int
) -> None:
    text = b"".join(os.urandom(20).hex().encode() + b"\n" for _ in range(lines))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz" if suffix == ".tar.gz" else "w") as archive:
        info = tarfile.TarInfo("server.log")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    whole = buffer.getvalue()
    path = tmp_path / f"a{suffix}"
    kept = 512 + len(text) // 2 if suffix == ".tar" else len(whole) // 2
    path.write_bytes(whole[:kept])
    items = {item.path.removeprefix(str(path)): item for item in expand([str(path)])}
    assert items[""].problem
    with items["!server.log"].open() as stream:
        found = b""
        with pytest.raises(EOFError, match="ends in the middle"):
            while block := stream.read(1000):
                found += block
    assert text.startswith(found)
    if suffix == ".tar":
        assert len(found) == len(text) // 2
    else:
        assert len(found) > len(text) * 0.4
