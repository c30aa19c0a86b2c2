"""Files that are never half-written, and never put in place of something that is no file."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.files import (
    check_replaceable,
    open_text_atomic,
    write_json_atomic,
    write_text_atomic,
)


def make_pipe(path):
    os.mkfifo(path)


def make_folder(path):
    path.mkdir()


def make_link(path):
    real = path.with_name("real")
    real.write_text("kept", encoding="utf-8")
    path.symlink_to(real)


def make_dangling_link(path):
    path.symlink_to(path.with_name("nowhere"))


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def text(path):
    write_text_atomic(path, "new")


def value(path):
    write_json_atomic(path, {"new": 1})


def rows(path):
    import pyarrow as pa

    from agentbench_prefix.corpora.storage import TableWriter

    with TableWriter(path, pa.schema([("n", pa.int32())])) as writer:
        writer.write({"n": 1})


WRITERS = [text, value, rows]
SPECIAL = [
    (make_pipe, "a named pipe"),
    (make_folder, "a folder"),
    (make_link, "a symbolic link"),
    (make_dangling_link, "a symbolic link"),
    (make_socket, "a socket"),
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("make", "kind"), SPECIAL)
def test_what_is_no_regular_file_is_never_replaced(short_tmp_path, make, kind, write):
    path = short_tmp_path / "out"
    make(path)
    before = path.lstat()
    with pytest.raises(ConfigurationError, match=f"cannot write .*out: it is {kind}"):
        write(path)
    assert os.path.samestat(before, path.lstat())
    assert {entry.name for entry in short_tmp_path.iterdir()} <= {"out", "real"}
    if make is make_link:
        assert path.read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_is_made_and_replaced(tmp_path, write):
    path = tmp_path / "folder" / "out"
    write(path)
    made = path.read_bytes()
    path.write_text("old", encoding="utf-8")
    write(path)
    assert path.read_bytes() == made
    assert [entry.name for entry in path.parent.iterdir()] == ["out"]


def text_with(path, meanwhile):
    with open_text_atomic(path) as file:
        file.write("new")
        meanwhile(path)


def rows_with(path, meanwhile):
    import pyarrow as pa

    from agentbench_prefix.corpora.storage import TableWriter

    with TableWriter(path, pa.schema([("n", pa.int32())])) as writer:
        writer.write({"n": 1})
        meanwhile(path)


def fail(path):
    raise KeyError


@pytest.mark.parametrize("write", [text_with, rows_with])
def test_what_appears_meanwhile_is_not_replaced_either(tmp_path, write):
    path = tmp_path / "out"
    with pytest.raises(ConfigurationError, match="a named pipe"):
        write(path, make_pipe)
    assert stat.S_ISFIFO(path.lstat().st_mode)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("write", [text_with, rows_with])
def test_an_error_leaves_the_old_file(tmp_path, write):
    path = tmp_path / "out"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(KeyError):
        write(path, fail)
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_free_path_and_a_file_may_be_replaced(tmp_path):
    check_replaceable(tmp_path / "nothing")
    (tmp_path / "file").touch()
    check_replaceable(tmp_path / "file")


@pytest.fixture
def short_tmp_path(tmp_path, monkeypatch):
    """A socket's path may not be long: everything is done from within the folder."""
    monkeypatch.chdir(tmp_path)
    return type(tmp_path)()
