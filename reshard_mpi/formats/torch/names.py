"""Names in pickles: which of them serve to run something, and how older protocols spell some."""

from __future__ import annotations

from reshard_mpi.formats.nest.trees import BYTES_IO, Global

# Modules that serve to run something: a checkpoint that names one of them is none. What they would have done is not
# asked. The names of `builtins` that only hold data are no part of it.
_RUNNERS = frozenset(
    (
        *(
            "_aix_support",
            "_imp",
            "_io",
            "_osx_support",
            "_pickle",
            "_posixsubprocess",
            "_pyrepl",
            "_thread",
            "asyncio",
        ),
        *("bdb", "cProfile", "cPickle", "code", "codeop", "commands", "concurrent", "ctypes", "_ctypes", "dill"),
        *("cloudpickle", "distutils", "doctest", "ensurepip", "http", "idlelib", "imp", "importlib", "io", "joblib"),
        *("lib2to3", "linecache", "marshal", "multiprocessing", "nt", "ntpath", "os", "pdb", "pickle", "pickletools"),
        *("pip", "pkgutil", "popen2", "posix", "posixpath", "profile", "pty", "py_compile", "pydoc", "requests"),
        *("runpy", "setuptools", "shelve", "shutil", "signal", "site", "smtplib", "socket", "ssl", "subprocess"),
        *("sys", "tempfile", "test", "threading", "timeit", "trace", "unittest", "urllib", "venv", "webbrowser"),
        *("winreg", "xmlrpc", "zipimport"),
    )
)
_DATA_OF_BUILTINS = frozenset(
    (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range"),
        *("set", "slice", "str", "tuple", "Ellipsis", "NotImplemented"),
    )
)
# Protocols below 3 spell some names as Python 2 did.
OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
OLD_NAMES = {
    Global("__builtin__", "xrange"): Global("builtins", "range"),
    Global("__builtin__", "unicode"): Global("builtins", "str"),
    Global("__builtin__", "long"): Global("builtins", "int"),
}


def runs_code(name: Global) -> bool:
    """Tell whether what is called so serves to run something."""
    if name.module == "builtins":
        return name.name not in _DATA_OF_BUILTINS
    return name != BYTES_IO and name.module.partition(".")[0] in _RUNNERS
