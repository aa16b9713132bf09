"""Keep the working folder out of Python's import path (`keep_out_the_working_folder`).

With `python -m`, `python -c` and at a prompt, Python looks for modules in the working folder, so it would run a
`resource.py` or `numpy.py` that lies beside a checkpoint. Imports of this package, and of what it imports, therefore
leave that folder out; imports of the caller's own code do not change. Folders that the user names in PYTHONPATH are
always searched.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType

_PACKAGE = "reshard_mpi"
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# The interpreter's own class: `importlib` may be a file.
_PathFinder = sys.modules["_frozen_importlib_external"].PathFinder
# Makes a new interpreter import this package from where this process has it, and nothing else from there.
_BOOT = "import sys; sys.path.insert(0, {home!r}); import reshard_mpi; del sys.path[0]\n{program}"


class _NotHereFinder:
    """Finds what this package imports, anywhere but in the working folder."""

    @staticmethod
    def find_spec(
        name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return the spec of a top-level module, None for a search that is not this package's.

        Raises ModuleNotFoundError if only the working folder has such a module.
        """
        if path is not None:
            return None
        elsewhere, here = _divided_path()
        if not here or not _is_for_this_package(sys._getframe(1), here):
            return None
        for finder in (_PathFinder, *_finders_behind()):
            spec: ModuleSpec | None = finder.find_spec(name, elsewhere if finder is _PathFinder else None, target)
            if spec is not None:
                return spec
        if _PathFinder.find_spec(name, here, target) is not None:
            raise ModuleNotFoundError(
                f"No module named {name!r}, but for the one in the working folder, where {_PACKAGE} does not look",
                name=name,
            )
        return None


def keep_out_the_working_folder() -> None:
    """Leave the working folder out of all imports of this package from now on."""
    if _NotHereFinder not in sys.meta_path:
        before = sys.meta_path.index(_PathFinder) if _PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(before, _NotHereFinder)


def fresh_interpreter(program: str) -> list[str]:
    """Return the command line of an interpreter that imports this package and runs the source code `program`."""
    return [sys.executable, "-P", "-c", _BOOT.format(home=_HOME, program=program)]


def import_environment() -> dict[str, str]:
    """Return the variables with which another interpreter imports from the same folders, but not the working folder.

    `fresh_interpreter` finds this package itself, even in a checkout that is the working folder.
    """
    return {"PYTHONPATH": os.pathsep.join(_divided_path()[0])}


def _is_for_this_package(frame: "FrameType | None", here: "Sequence[str]") -> bool:
    """Tell whether this package, or one of its imports, asks for a module, rather than the caller's code.

    Args:
        frame: that of the import. The caller's code is the program, and what it has imported from the folder `here`.
    """
    folders = set(map(_absolute, here))
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if isinstance(name, str):
            top = name.partition(".")[0]
            if top == _PACKAGE:
                return True
            if top == "__main__" or _folder_of(frame.f_globals.get("__spec__")) in folders:
                return False
        frame = frame.f_back
    return False


def _folder_of(spec: object) -> str | None:
    """Return the folder in which the module or package of a spec lies; None if it is not in a file."""
    origin = getattr(spec, "origin", None)
    if not getattr(spec, "has_location", False) or not isinstance(origin, str):
        return None
    folder = os.path.dirname(_absolute(origin))
    return folder if getattr(spec, "submodule_search_locations", None) is None else os.path.dirname(folder)


def _finders_behind() -> "Sequence[type[_NotHereFinder]]":
    """Return the finders after Python's usual one, such as finders of editable installations."""
    behind = sys.meta_path.index(_PathFinder) + 1 if _PathFinder in sys.meta_path else len(sys.meta_path)
    return [finder for finder in sys.meta_path[behind:] if hasattr(finder, "find_spec")]  # type: ignore[misc]


# The last result of `_divided_path`, and what it depends on.
_divided: "tuple[object, tuple[list[str], list[str]]]" = (None, ([], []))


def _divided_path() -> "tuple[list[str], list[str]]":
    """Return `sys.path` in two lists: the entries for other folders, and those for the working folder."""
    global _divided  # noqa: PLW0603 - a cache of one
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""  # it is gone
    key = (cwd, tuple(sys.path), os.environ.get("PYTHONPATH"))
    if _divided[0] != key:
        elsewhere: list[str] = []
        here: list[str] = []
        named = _named_by_user()
        for entry in sys.path:
            (here if _is_working_folder(entry, cwd, named) else elsewhere).append(entry)
        _divided = key, (elsewhere, here)
    return _divided[1]


def _is_working_folder(entry: object, cwd: str, named: "Sequence[str]") -> bool:
    if not isinstance(entry, str) or entry in named:
        return False
    if not os.path.isabs(entry):
        return True
    try:
        return os.path.samefile(entry, cwd) and not _is_installation(entry)
    except OSError:
        return False


def _named_by_user() -> "list[str]":
    """Return the folders in PYTHONPATH. Empty parts of it, as `$PYTHONPATH:/more` may leave, are passed over."""
    if sys.flags.ignore_environment:
        return []
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [_absolute(part) for part in parts if part]


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except OSError:  # the working folder is gone
        return path


def _is_installation(folder: str) -> bool:
    """Tell whether this package was installed into `folder` (pip --target), with its dependencies beside it."""
    if not os.path.samefile(folder, _HOME):
        return False
    return any(name.startswith(f"{_PACKAGE}-") and name.endswith(".dist-info") for name in os.listdir(folder))
