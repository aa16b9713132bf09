"""Keep the facts of each format, which need no import of its module (`FormatInfo`, `info`, `register`).

Code outside of `formats` asks for these facts, never for names. A package that is installed adds a format by an entry
point of the group `reshard_mpi.formats`, which leads to a `FormatInfo`:

    [project.entry-points."reshard_mpi.formats"]
    toy = "toy_package:TOY"
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from reshard_mpi.errors import UsageError
from reshard_mpi.text import KIB, MIB

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from reshard_mpi.formats.protocol import FolderFormat, Format

_GROUP = "reshard_mpi.formats"
_SUFFIX = re.compile(r"\.[^/]+")


# How our `.metadata` begins: a pickle of protocol 2. Torch and Megatron write protocol 4 or later.
_OWN_METADATA = b"\x80\x02"


class FormatInfo(NamedTuple):
    """The facts of a format: its name, the marks of its files, its abilities and its costs.

    Example, of a format that is only read:

        FormatInfo("toy", "toy_package.toy", (".toy",), read_tensor_bytes=1024, is_target=False)
    """

    name: str  # in options and reports, and in the manifests of its shards
    module: str  # the module with its functions (see `protocol.Format`), which is imported when it is needed
    suffixes: tuple[str, ...]  # file name endings; a file whose ending several formats have is a shard of the first
    # memory that a process needs because of the format, measured and rounded up (`test_target_needs.py`)
    read_tensor_bytes: int  # for each tensor of a shard that is read
    written_tensor_bytes: int = 0  # for each tensor of a shard that is written
    library_bytes: int = 0  # for what is loaded to write
    child_bytes: int = 0  # for a child process that reads files of other programs, if there is one
    needs_numpy: bool = False  # whether numpy is loaded to write as well, which comes on top
    title: str = ""  # the words for its checkpoints, if not its name
    is_target: bool = True  # whether checkpoints of the format can be written
    # names of files that mark a folder as one checkpoint, the index first; if `index_says`, only an index that has
    # these bytes near its beginning, since others use its name too
    marks: tuple[str, ...] = ()
    index_says: bytes = b""
    # how an index with settings begins that this program has written; an index of others begins otherwise
    own_index: bytes = b""
    # names of formats whose marks its folders have as well, and which would read less of them
    also_marked_as: tuple[str, ...] = ()
    before_index: tuple[str, ...] = ()  # names of files that belong to the index, and are written before it
    # the pattern of the names of a checkpoint's files, which mark their folder as well
    parts: re.Pattern[str] | None = None
    # names of files that name the latest checkpoint of the folders beside them, or the number of its iteration
    pointer_files: tuple[str, ...] = ()
    # whether other programs use these names too, so that they count only where they lead to a checkpoint of the format
    pointers_are_common: bool = False
    # whether a checkpoint is a folder that is opened as a whole: an index, or the names of its files, tell which belong
    # to it (see `protocol.FolderFormat`)
    is_folder: bool = False
    # whether a folder tells which files it should have; if not, the user must say how many
    knows_file_count: bool = True
    # whether people save the parts of a training's state, such as model and optimizer, in files or folders of their own
    has_branches: bool = False
    split_by_size: bool = False  # a checkpoint is a full one, in files that are filled up to a size
    # of a whole training only the model is kept, whose tensors have names without the `model.` before them
    holds_model_alone: bool = False
    joins_by_strategy: bool = False  # a source strategy may say how slices in its files join, which these may not say
    packs: bool = False  # files have parts of tensors as its framework lays them out (`protocol.PackingFormat`)
    names_parts: bool = False  # its files list the parts by name, so that each file can be compared with its parts
    needs: tuple[str, ...] = ()  # names of options that its targets need, and no others take
    takes: tuple[str, ...] = ()  # names of further options that they take
    describes_itself: bool = False  # a shard states its rank and how its checkpoint is sharded
    has_crc: bool = False  # a shard can be sealed with a checksum of the whole file
    crc_counts_scalars: bool = False  # that checksum counts scalars of whole numbers (see `manifest.is_in_crc`)
    sums_payloads: bool = False  # sealing a shard reads its payloads, whatever is asked for
    keeps_sums: bool = False  # a shard has a place for sums of its tensors
    keeps_strings: bool = True  # it has a place for strings
    shares_blocks: bool = False  # large tensors are aligned so that file systems can share their blocks
    # the format in which such a checkpoint is written instead if it is cut over ranks
    sharded_variant: str | None = None
    # the format in which what is read is written, unless another one is asked for; None: the same
    default_target: str | None = None
    # names of types that its own framework writes and does not read again: they are taken over from shards of the same
    # format alone
    types_own_loader_refuses: tuple[str, ...] = ()
    own_loader_refuses_empty: bool = False  # whether that framework refuses a shard of nothing

    def index_names(self, prefix: object = "") -> tuple[str, ...]:
        """Return the names of the files that are written when all others are complete, in order.

        The last of them makes the folder a checkpoint: the index; or, of a format that packs, what names the folder of
        the checkpoint, in which its index lies.

        Args:
            prefix: of the run's file names. That of a format that packs begins with the name of that folder.
        """
        index, folder = (*self.before_index, *self.marks[:1]), str(prefix).partition("/")[0]
        return (*(f"{folder}/{name}" for name in index), *self.pointer_files[:1]) if self.packs else index

    def load(self) -> Format:
        """Import and return the module with the functions of the format.

        Raises UsageError if it is another package's, and cannot be imported or lacks functions.
        """
        if self.module.partition(".")[0] == __name__.partition(".")[0]:
            return cast("Format", import_module(self.module))
        try:
            module = import_module(self.module)
        except Exception as error:
            raise _not_loaded(self.name, "a module that can be imported", error, self.module) from error
        lacking = [name for name in self.functions if not callable(getattr(module, name, None))]
        if lacking:
            problem = f"functions {', '.join(self.functions)}"
            raise _not_loaded(self.name, problem, f"no {', no '.join(lacking)}", self.module)
        return cast("Format", module)

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options that not all targets take, but these."""
        return (*self.needs, *self.takes)

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the functions that its module must have."""
        return (
            *("locate", "stored_sums", "check_crc"),
            *(("size_at_most_bytes", "reserve", "seal", "read_back") if self.is_target else ()),
            *(("files_of", "open_folder") if self.is_folder else ()),
            *(("file_name", "index_contents") if self.is_folder and self.is_target else ()),
            *(("packed", "as_read") if self.packs else ()),
        )

    def load_folder(self) -> FolderFormat | None:
        """Import and return the module of a format whose checkpoints are folders; None for others."""
        return cast("FolderFormat", self.load()) if self.is_folder else None


_LATEST_ITERATION = "latest_checkpointed_iteration.txt"
_BUILT_IN = (
    FormatInfo(
        "ckpt",
        "reshard_mpi.formats.ckpt",
        (".ckpt",),
        read_tensor_bytes=KIB // 4,
        written_tensor_bytes=KIB // 4,
        title="MindSpore checkpoint",
        has_crc=True,
        types_own_loader_refuses=("float8_e4m3fn", "float8_e5m2", "hifloat8"),  # load_checkpoint of 2.10 refuses them
        own_loader_refuses_empty=True,  # as it refuses any file without a parameter
    ),
    FormatInfo(
        "hdf5",
        "reshard_mpi.formats.hdf5",
        (".h5", ".hdf5"),
        read_tensor_bytes=KIB // 4,
        written_tensor_bytes=3 * KIB,
        library_bytes=15 * MIB,
        child_bytes=60 * MIB,
        needs_numpy=True,
        title="HDF5",
        describes_itself=True,
        keeps_sums=True,
        shares_blocks=True,
    ),
    FormatInfo(
        "safetensors",
        "reshard_mpi.formats.safetensors",
        (".safetensors",),
        read_tensor_bytes=KIB // 4,
        written_tensor_bytes=KIB // 4,
        library_bytes=2 * MIB,
        has_crc=True,
        crc_counts_scalars=True,
        shares_blocks=True,
    ),
    FormatInfo(
        "hf",
        "reshard_mpi.formats.safetensors.huggingface",
        (".safetensors",),
        read_tensor_bytes=KIB // 4,
        written_tensor_bytes=KIB // 4,
        library_bytes=2 * MIB,
        title="Hugging Face folder",
        marks=("model.safetensors.index.json", "model.safetensors", "param_name_map.json"),
        is_folder=True,
        split_by_size=True,
        takes=("max_shard_size",),
        holds_model_alone=True,
        keeps_strings=False,
        shares_blocks=True,
        sharded_variant="safetensors",
    ),
    FormatInfo(
        "dcp",
        "reshard_mpi.formats.dcp",
        (".distcp",),
        read_tensor_bytes=KIB,
        written_tensor_bytes=2 * KIB,
        library_bytes=2 * MIB,
        title="torch distributed checkpoint",
        marks=(".metadata",),
        own_index=_OWN_METADATA,
        pointer_files=(_LATEST_ITERATION,),  # Megatron's
        is_folder=True,
        has_branches=True,
        shares_blocks=True,
    ),
    FormatInfo(
        "torch",
        "reshard_mpi.formats.torch",
        (".pt", ".pth", ".bin"),
        read_tensor_bytes=3 * KIB // 2,
        written_tensor_bytes=2 * KIB,
        library_bytes=2 * MIB,
        title="torch checkpoint",
        sums_payloads=True,
        has_branches=True,
        describes_itself=True,
        has_crc=True,
    ),
    FormatInfo(
        "deepspeed",
        "reshard_mpi.formats.deepspeed",
        (".pt",),
        read_tensor_bytes=4 * KIB,
        written_tensor_bytes=4 * KIB,
        library_bytes=2 * MIB,
        title="DeepSpeed checkpoint",
        sums_payloads=True,
        parts=re.compile(
            r"((bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+(_model|_?optim)_states\.pt"
            r"|layer_\d+(-model_\d+)?-model_states\.pt|(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"
            r"|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
        ),
        pointer_files=("latest", "latest_universal"),
        pointers_are_common=True,
        is_folder=True,
        joins_by_strategy=True,
        packs=True,
        needs=("dp", "zero_stage"),
        takes=("ep",),
        has_crc=True,
        sharded_variant="torch",
        default_target="torch",
    ),
    FormatInfo(
        "megatron",
        "reshard_mpi.formats.megatron",
        (".distcp", ".pt"),
        read_tensor_bytes=4 * KIB,
        written_tensor_bytes=4 * KIB,
        library_bytes=2 * MIB,
        title="Megatron checkpoint",
        marks=("metadata.json",),
        index_says=b'"torch_dist"',
        before_index=("common.pt", ".metadata"),
        own_index=_OWN_METADATA,
        parts=re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}"),
        also_marked_as=("dcp",),
        pointer_files=(_LATEST_ITERATION,),
        is_folder=True,
        packs=True,
        names_parts=True,
        takes=("ep", "core_version", "max_shard_size"),
        shares_blocks=True,
        sharded_variant="torch",
        default_target="torch",
    ),
    FormatInfo(
        "mindformers",
        "reshard_mpi.formats.safetensors.mindformers",
        (".safetensors",),
        read_tensor_bytes=2 * KIB,
        title="MindFormers checkpoint",
        is_target=False,
        marks=("metadata.json",),
        index_says=b'"state_dict_metadata"',
        parts=re.compile(r".*-(model|opt)-\d{7}-\d{7}\.safetensors"),
        pointer_files=(_LATEST_ITERATION,),
        is_folder=True,
        default_target="safetensors",
    ),
    FormatInfo(
        "dcp-safetensors",
        "reshard_mpi.formats.safetensors.torch_dcp",
        (".safetensors",),
        read_tensor_bytes=KIB,
        title="torch distributed checkpoint in safetensors",
        is_target=False,
        parts=re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors"),
        is_folder=True,
        knows_file_count=False,
        sharded_variant="safetensors",
        default_target="hf",
    ),
)


def all_formats() -> tuple[FormatInfo, ...]:
    """Return the facts of all formats, built-in ones first."""
    return tuple(_registered().values())


def names() -> tuple[str, ...]:
    """Return the names of all formats."""
    return tuple(_registered())


def targets() -> tuple[str, ...]:
    """Return the names of the formats that can be written."""
    return tuple(name for name, form in _registered().items() if form.is_target)


def info(name: str) -> FormatInfo:
    """Return the facts of the format called `name`. Raises UsageError if there is none, or if it was left out."""
    form = _registered().get(name)
    if form is None:
        raise _left_out.get(name) or UsageError(
            "unknown checkpoint format", expected=" or ".join(names()), got=repr(name)
        )
    return form


def left_out() -> Mapping[str, UsageError]:
    """Return why formats of installed packages are left out, by their names, once any format has been asked for."""
    return _left_out


def register(form: FormatInfo) -> None:
    """Add a format. Raises UsageError if there is one of its name or with its file name endings, or if those are none.

    A format of folders may have the endings of others, since its files are told by their folder.
    """
    _add(_registered(), form)


def unregister(name: str) -> None:
    """Remove a format that was added by `register`, as after a test of it."""
    del _registered()[name]


# By the name of their entry point, why formats of installed packages are left out.
_left_out: dict[str, UsageError] = {}


@cache
def _registered() -> dict[str, FormatInfo]:
    registered = {form.name: form for form in _BUILT_IN}
    for folder in _folders_with_formats():
        from importlib.metadata import Distribution  # takes as long as a small conversion, and is hardly ever needed

        for point in Distribution.at(folder).entry_points.select(group=_GROUP):
            try:
                _add(registered, _loaded(point, str(folder)))
            except UsageError as error:
                _left_out[point.name] = error
    return registered


def _add(registered: dict[str, FormatInfo], form: FormatInfo) -> None:
    remedy = "uninstall one of their packages"
    if form.name in registered:
        modules = f"{registered[form.name].module} and {form.module}"
        raise UsageError(f"two checkpoint formats are called {form.name}", got=modules, remedy=remedy)
    suffixes = form.suffixes
    is_sound = type(suffixes) is tuple and all(type(own) is str and _SUFFIX.fullmatch(own) for own in suffixes)
    if not suffixes or not is_sound:
        expected = "a tuple of file name endings that begin with a dot"
        raise UsageError(f"the suffixes of the format {form.name} are none", expected=expected, got=repr(suffixes)[:80])
    others = [(end, other.name) for other in registered.values() for end in other.suffixes]
    for suffix, (taken, other_name) in product(suffixes, () if form.is_folder else others):
        if suffix.endswith(taken) or taken.endswith(suffix):
            raise UsageError(
                f"files of the format {form.name} would be taken for those of {other_name}",
                expected="endings that no other format has, unless its checkpoints are folders",
                got=f"{suffix}, and {taken} of {other_name}",
                remedy=remedy,
            )
    registered[form.name] = form


def _loaded(point: EntryPoint, folder: str) -> FormatInfo:
    """Return the format that an entry point leads to. Raises UsageError if it leads to none."""
    expected = f"a FormatInfo called {point.name}"
    try:
        form = point.load()
    except Exception as error:
        raise _not_loaded(point.name, expected, error, folder) from error
    if not isinstance(form, FormatInfo):
        raise _not_loaded(point.name, expected, f"a {type(form).__name__}", folder)
    if form.name != point.name:
        raise _not_loaded(point.name, expected, f"one called {str(form.name)[:80]}", folder)
    return form


def _not_loaded(name: str, expected: str, got: str | Exception, where: str) -> UsageError:
    return UsageError(
        f"the format {name} of an installed package cannot be loaded",
        expected=expected,
        got=got if isinstance(got, str) else f"{type(got).__name__}: {got}"[:200],
        where=where,
        remedy="uninstall the package, or install a version that fits this program",
    )


def _folders_with_formats() -> Iterator[Path]:
    """Yield the metadata folders of installed packages that have entry points of this group."""
    for folder in filter(os.path.isabs, sys.path):
        try:
            packages = sorted(name for name in os.listdir(folder) if name.endswith(".dist-info"))  # noqa: PTH208 - quicker
        except OSError:  # an archive, or a folder that is not there
            continue
        for name in packages:
            with suppress(OSError), open(f"{folder}/{name}/entry_points.txt", "rb") as stream:  # noqa: PTH123 - quicker
                if f"[{_GROUP}]".encode() in stream.read():
                    yield Path(folder, name)
