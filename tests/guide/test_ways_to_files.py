"""Formats and checkpoints see files and folders through `filesystem.source_files` alone: another store can stand there.

Only reading is meant: whoever writes a target has its descriptor.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.module_tree import PACKAGE, nodes

pytestmark = pytest.mark.xdist_group("syntax trees")

# Ways to a file or folder: functions, those of `os` and `os.path`, and methods of paths.
FUNCTIONS = {"open"}
OF_OS = {
    "fstat",
    "listdir",
    "lstat",
    "open",
    "pread",
    "preadv",
    "readlink",
    "readv",
    "scandir",
    "stat",
    "statvfs",
    "walk",
}
OF_OS_PATH = {"exists", "getmtime", "getsize", "isdir", "isfile", "islink", "lexists", "samefile"}
OF_PATHS = {
    *("exists", "glob", "is_dir", "is_fifo", "is_file", "is_mount", "is_socket", "is_symlink", "iterdir", "lstat"),
    *("open", "read_bytes", "read_text", "readlink", "rglob", "samefile", "stat", "walk"),
}
# Modules that have them under other names, or others.
MODULES = {"glob2", "io", "os", "os.path", "posix", "shutil"}
# What has functions or methods of these names that lead to no file: the store; the library's modules for what is inside
# an open file; and what is no path.
OTHERS = {"source_files", "h5a", "h5d", "h5g", "h5o", "links", "datasets", "types", "self", "candidates"}

EXCEPTIONS = {
    "formats/hdf5/datasets.py": {"h5f.open": "the library opens its file by itself, in a process of its own"},
    "formats/hdf5/reader_process_main.py": {
        "os.fstat": "asks which descriptors of its own are open",
        "Path('/proc/self/status').read_text": "asks how much memory it has itself",
    },
    "formats/hdf5/reader_process.py": {"os.readv": "reads the pipe between the two processes"},
    "formats/hdf5/writer.py": {
        "os.statvfs": "asks for room for its scratch file in memory",
        "os.fstat": "asks for the length of that",
        "os.pread": "copies it into the target",
    },
    "formats/protocol.py": {"os.open": "opens a target that is to be sealed, for writing"},
    "formats/registry.py": {
        "os.listdir": "looks for installed packages that bring formats",
        "open": "reads which formats they bring",
    },
}


def ways(path: Path) -> Iterator[str]:
    """Yield the ways to files and folders that a module takes, as they stand there."""
    for node in nodes(path):
        match node:
            case ast.ImportFrom(module=module) if module in MODULES:
                yield f"from {module}"
            case ast.Attribute(value=ast.Name("os"), attr=name):
                if name in OF_OS:
                    yield ast.unparse(node)
            case ast.Attribute(value=ast.Attribute(value=ast.Name("os"), attr="path"), attr=name):
                if name in OF_OS_PATH:
                    yield ast.unparse(node)
            case ast.Call(func=ast.Name(name)) if name in FUNCTIONS:
                yield name
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in OF_PATHS:
                if ast.unparse(value).split(".")[-1] not in {"os", *OTHERS}:
                    yield ast.unparse(node.func)


def test_files_are_seen_through_the_store_alone() -> None:
    seen = [*PACKAGE.glob("formats/**/*.py"), *PACKAGE.glob("checkpoints/**/*.py")]
    taken = {str(path.relative_to(PACKAGE)): set(ways(path)) for path in seen}
    assert {name: found for name, found in taken.items() if found} == {
        name: {*ways} for name, ways in EXCEPTIONS.items()
    }


@pytest.mark.parametrize(
    ("code", "way"),
    [
        ("import os\ncontent = os.pread(fd, 1, 0)", "os.pread"),
        ("look = os.stat", "os.stat"),
        ("os.path.isdir(Path(folder, name))", "os.path.isdir"),
        ("any(Path(folder, name).is_file() for name in names)", "Path(folder, name).is_file"),
        ("(folder / name).open('rb')", "(folder / name).open"),
        ("with open(path, 'rb') as stream: pass", "open"),
        ("from os import listdir", "from os"),
    ],
)
def test_other_ways_are_noticed(tmp_path: Path, code: str, way: str) -> None:
    (tmp_path / "module.py").write_text(code)
    assert list(ways(tmp_path / "module.py")) == [way]
