"""`python -m benchmarks BENCHMARK`: run a benchmark, from a checkout."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from types import FrameType

from benchmarks import (
    audit,
    conversion,
    deepspeed,
    forms,
    maps,
    megatron,
    objects,
    opening,
    planning,
    quantized,
    scaling,
    startup,
    tensors,
    verification,
)
from benchmarks.measure import CommandFailedError
from benchmarks.plot import draw, lacks_matplotlib
from benchmarks.results import Results
from benchmarks.targets import LARGE_MB, QUANTIZED_MB, SMALL_MB
from benchmarks.workplace import NoRoomError

_INTERRUPTED = 130
_TERMINATED = 143

_CONVERSION = """\
Reshards a GPT-like checkpoint, weights and two Adam moments, from 8 ranks (data parallel 2, tensor parallel 4) to 4
(2 x 2 with optimizer sharding), and compares

  cp         with `cp` of what was written, in as many processes: every size and format, whole command; and .ckpt of
             8 ranks, cut into rows, to 3, cut into columns
  mindspore  with MindSpore's transform_checkpoints and transform_checkpoint_by_rank: whole command, peak memory
  torch      with loading into the new mesh and saving by torch.distributed.checkpoint, 4 processes: API and command
  sharing    on an XFS that shares blocks (an image that root can mount), with `cp --reflink=never`: time in the engine

The frameworks are measured at the smallest size, on .ckpt; the sharing at the largest, on HDF5. What is not installed
is named as missing.
"""

_PLANNING = """\
Times rank_list_for_transform for one target rank, the strategy files read included, as the first call of a fresh
process: 64 -> 48, 1,024 -> 768, 4,096 -> 3,072 and 16,384 -> 12,288 ranks with 600 parameters, and the last with
10,000. Then the plan of one target rank, strategies read and shards described without any file, for 4,096 -> 3,072
ranks and for the largest job. All take turns.
"""
_STARTUP = """\
Times `reshard-mpi --help`, `import reshard_mpi`, and the transform of a tiny checkpoint by 1 and by 2 processes, each
beside `python -c pass`.
"""
_SCALING = """\
Reshards a GPT-like checkpoint of 8 ranks (tensor parallel 8) into one full checkpoint, by different numbers of
processes, each compared with the least: time in the engine and of the whole command.
"""
_VERIFICATION = """\
Reshards a GPT-like checkpoint with --verify beside the same without it, for .ckpt and HDF5; then sums, in one process
and from the page cache, a piece of a tensor that is one run and one whose runs have 512 bytes.
"""
_FORMS = """\
Takes checkpoints from one form to another: safetensors of 8 ranks to 4 beside MindSpore's transform_checkpoints, and
to a Hugging Face folder beside its unified_safetensors and torch's consolidation (CPU time); torch's distributed
checkpoint to another mesh beside its own load and save, and to one file beside dcp_to_torch_save; then a larger
checkpoint to each form beside `cp` of what was written.
"""
_MAPS = """\
Takes a mixture of experts of 4 ranks through maps to 2: queries, keys, values and experts regrouped, all transposed,
and all cast to bfloat16, each beside `cp`; then plans one rank of DeepSeek-V3 from Hugging Face's layout to experts
stacked, from files without payloads, and compiles a map of its experts.
"""
_TENSORS = """\
Reshards checkpoints of very many small tensors, float32 of 64 x 64, cut along rows over 4 ranks, into columns over 2:
beside safetensors' own loading and saving, beside torch's distributed checkpoint, to and from every other format, and a
larger one beside a smaller. Then moves small pieces in the engine alone, and tells its CPU time.
"""
_OPEN = """\
Reads checkpoints without converting them: `dcp.load` into another mesh by our reader beside torch's own, from torch's
distributed checkpoint and from a Hugging Face folder; one row of each of 2,000 tensors beside safetensors' slices; then
`open` alone, of 64 ranks of 600 tensors each, and of 20,000 tensors in several formats.
"""
_DEEPSPEED = """\
Takes a checkpoint of ZeRO-2 of 4 ranks, in bf16 and with the optimizer, to whole weights in fp32 beside DeepSpeed's
zero_to_fp32.py, and to ZeRO-2 of 8 ranks beside its ds_to_universal.py, which puts all pieces into temporary files
first. Time, CPU time and memory.
"""
_MEGATRON = """\
Takes weights of Megatron's torch_dist to a Hugging Face folder beside torch's dcp_to_torch_save, and the optimizer of
tensor parallelism 2 and 2 stages out of its buckets (dp_reshardable) into the form that any layout loads, beside `cp`
of what was written; then opens a checkpoint with a very long index.
"""
_QUANTIZED = """\
Makes bfloat16 of a Hugging Face folder of fp8 with a scale for each block of 128 x 128, beside torch doing so file by
file and tensor by tensor: `load_file`, multiply in float32, `save_file`. Time, CPU time and memory.
"""
_AUDIT = """\
Compares two files in numbers (diff --values), where all elements differ and where none does, beside `cmp` of two files
that are the same. Then audits a checkpoint of two files in fp32, and in bf16, each beside `sha256sum` of the files by
two processes; and 30,000 tensors of experts.
"""
_OBJECTS = """\
Starts SeaweedFS, and reshards checkpoints in it: bytes through the client where the store can copy slices by itself,
ranges to open a checkpoint, source read where 4 targets want a quarter each, CPU time and memory of the client beside
`aws s3 cp`, and runs that are killed at random instants.
"""


def main() -> None:
    """Parse the command line, run the benchmark it names, and give the result in the forms asked for."""
    signal.signal(signal.SIGTERM, _terminate)
    options = parser().parse_args()
    problem = lacks_matplotlib() if options.plot else None
    if problem is not None:
        sys.exit(f"benchmarks: {problem}")
    try:
        results: Results = options.run(options)
    except (NoRoomError, CommandFailedError) as error:
        sys.exit(f"benchmarks: {error}")
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    _give(results, options.json, options.plot)
    sys.exit(1 if results.failed else 0)


def _give(results: Results, where: str | None, plot: str | None) -> None:
    if where is not None:
        text = json.dumps(results.as_json(), indent=1)
        if where == "-":
            print(text)
        else:
            Path(where).write_text(text + "\n")
    if where != "-":
        print(results.as_markdown())
    if plot is not None:
        draw(results, Path(plot))


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line; `run` of what it returns does what was asked for."""
    whole = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures this project beside its peers, interleaved, on tensors made for it and removed again.",
    )
    commands = whole.add_subparsers(required=True, metavar="BENCHMARK")
    _add_conversion(_command(commands, "conversion", "whole conversions beside cp, MindSpore and torch", _CONVERSION))
    _add_planning(_command(commands, "planning", "rank lists and plans of up to 16,384 ranks", _PLANNING))
    _add_startup(_command(commands, "startup", "commands that move next to nothing", _STARTUP))
    _add_scaling(_command(commands, "scaling", "one file filled by several processes", _SCALING))
    _add_verification(_command(commands, "verification", "what --verify and verify cost", _VERIFICATION))
    _add_forms(_command(commands, "forms", "from one form of a checkpoint to another", _FORMS))
    _add_maps(_command(commands, "maps", "other names, shapes and types", _MAPS))
    _add_tensors(_command(commands, "tensors", "checkpoints of very many small tensors", _TENSORS))
    _add_open(_command(commands, "open", "checkpoints that are read where they are", _OPEN))
    _add_deepspeed(_command(commands, "deepspeed", "ZeRO's checkpoints beside DeepSpeed's scripts", _DEEPSPEED))
    _add_megatron(_command(commands, "megatron", "Megatron-Core's checkpoints", _MEGATRON))
    _add_quantized(_command(commands, "quantized", "quantized checkpoints dequantized", _QUANTIZED))
    _add_audit(_command(commands, "audit", "checkpoints compared in numbers, and audited", _AUDIT))
    _add_objects(_command(commands, "objects", "checkpoints in an object store", _OBJECTS))
    return whole


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, more: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=more,
        epilog="Progress goes to standard error. Exit code 1: a side failed, or there is no room; the output says so.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--pairs",
        type=_positive,
        default=5,
        metavar="N",
        help="counted runs of each side (default: %(default)s; fewer mean little)",
    )
    parser.add_argument(
        "--folder",
        type=_folder,
        help="where to work (default: in memory if there is room, else where temporary files go)",
    )
    parser.add_argument(
        "--json",
        type=_file,
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the result as JSON to FILE, or to standard output instead of the table",
    )
    parser.set_defaults(plot=None)
    return parser


def _add_conversion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--megabytes",
        type=_positive,
        action="append",
        metavar="N",
        help=f"size of the tensors, may be given several times (default: {SMALL_MB} and {LARGE_MB})",
    )
    parser.add_argument(
        "--format", choices=conversion.FORMATS, action="append", help="may be given twice (default: both)"
    )
    parser.add_argument(
        "--against", choices=conversion.AGAINST, action="append", help="may be given several times (default: all)"
    )
    parser.add_argument(
        "--processes", type=_positive, default=2, metavar="N", help="of ours, cp and MindSpore (default: %(default)s)"
    )
    parser.add_argument(
        "--mindspore",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter that has MindSpore (default: this one)",
    )
    parser.add_argument(
        "--torch", default=sys.executable, metavar="PYTHON", help="interpreter that has torch (default: this one)"
    )
    parser.add_argument("--plot", type=_file, metavar="FILE.png", help="draw throughput against size")
    parser.set_defaults(run=_run_conversion)


def _run_conversion(options: argparse.Namespace) -> Results:
    return conversion.measure(
        conversion.Settings(
            sizes_megabytes=tuple(options.megabytes or (SMALL_MB, LARGE_MB)),
            formats=tuple(options.format or conversion.FORMATS),
            against=tuple(options.against or conversion.AGAINST),
            pairs=options.pairs,
            processes=options.processes,
            folder=options.folder,
            mindspore=options.mindspore,
            torch=options.torch,
        )
    )


def _add_planning(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=lambda options: planning.measure(options.pairs, options.folder))


def _add_objects(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--megabytes",
        type=_positive,
        default=1074,
        metavar="N",
        help="size of what is read and written beside aws s3 cp (default: %(default)s, 1 GiB)",
    )
    parser.add_argument(
        "--kills", type=_positive, default=20, metavar="N", help="of how many runs (default: %(default)s)"
    )
    parser.set_defaults(
        run=lambda options: objects.measure(options.pairs, options.megabytes, options.kills, options.folder)
    )


def _add_startup(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=lambda options: startup.measure(options.pairs, options.folder))


def _add_scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--megabytes",
        type=_positive,
        default=LARGE_MB,
        metavar="N",
        help="size of the tensors (default: %(default)s, 4 GiB)",
    )
    parser.add_argument(
        "--processes",
        type=_positive,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="the counts to compare (default: 1 2)",
    )
    parser.add_argument("--format", choices=conversion.FORMATS, default="ckpt", help="(default: %(default)s)")
    parser.add_argument(
        "--plot", type=_file, metavar="FILE.png", help="draw throughput against the number of processes"
    )
    parser.set_defaults(run=_run_scaling)


def _run_scaling(options: argparse.Namespace) -> Results:
    if len(set(options.processes)) < 2:
        sys.exit("benchmarks: --processes needs two counts at least, to compare")
    return scaling.measure(
        scaling.Settings(options.megabytes, options.format, tuple(options.processes), options.pairs, options.folder)
    )


def _add_verification(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--megabytes", type=_positive, default=SMALL_MB, metavar="N", help="size of the tensors (default: %(default)s)"
    )
    parser.set_defaults(run=lambda options: verification.measure(options.megabytes, options.pairs, options.folder))


def _add_audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=_positive, default=LARGE_MB, metavar="N", help="(default: %(default)s)")
    parser.set_defaults(run=lambda options: audit.measure(options.megabytes, options.pairs, options.folder))


def _add_forms(parser: argparse.ArgumentParser) -> None:
    for name, size in (("--megabytes", SMALL_MB), ("--large-megabytes", LARGE_MB)):
        parser.add_argument(name, type=_positive, default=size, metavar="N", help="(default: %(default)s)")
    for name in ("mindspore", "torch"):
        text = f"interpreter that has {name} (default: this one)"
        parser.add_argument(f"--{name}", default=sys.executable, metavar="PYTHON", help=text)
    parser.set_defaults(
        run=lambda options: forms.measure(
            forms.Settings(
                options.megabytes,
                options.large_megabytes,
                options.pairs,
                options.folder,
                options.mindspore,
                options.torch,
            )
        )
    )


def _add_open(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=_positive, default=SMALL_MB, metavar="N", help="(default: %(default)s)")
    text = "interpreter that has torch and safetensors (default: this one)"
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help=text)
    parser.set_defaults(
        run=lambda options: opening.measure(options.megabytes, options.pairs, options.folder, options.torch)
    )


def _add_deepspeed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=_positive, default=SMALL_MB, metavar="N", help="(default: %(default)s)")
    text = "interpreter that has DeepSpeed, safetensors and huggingface_hub (default: this one)"
    parser.add_argument("--deepspeed", default=sys.executable, metavar="PYTHON", help=text)
    parser.set_defaults(
        run=lambda options: deepspeed.measure(options.megabytes, options.pairs, options.folder, options.deepspeed)
    )


def _add_megatron(parser: argparse.ArgumentParser) -> None:
    for name, count in (("--megabytes", SMALL_MB), ("--items", 100_000)):
        parser.add_argument(name, type=_positive, default=count, metavar="N", help="(default: %(default)s)")
    text = "interpreter that has torch (default: this one)"
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help=text)
    parser.set_defaults(
        run=lambda options: megatron.measure(
            options.megabytes, options.items, options.pairs, options.folder, options.torch
        )
    )


def _add_quantized(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=_positive, default=QUANTIZED_MB, metavar="N", help="(default: %(default)s)")
    text = "interpreter that has torch and safetensors (default: this one)"
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help=text)
    parser.set_defaults(
        run=lambda options: quantized.measure(options.megabytes, options.pairs, options.folder, options.torch)
    )


def _add_maps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=_positive, default=LARGE_MB, metavar="N", help="(default: %(default)s)")
    parser.set_defaults(run=lambda options: maps.measure(options.megabytes, options.pairs, options.folder))


def _add_tensors(parser: argparse.ArgumentParser) -> None:
    for name, count in (("--tensors", 20_000), ("--many", 100_000)):
        parser.add_argument(name, type=_positive, default=count, metavar="N", help="(default: %(default)s)")
    for name in ("safetensors", "torch"):
        text = f"interpreter that has {name} (default: this one)"
        parser.add_argument(f"--{name}", default=sys.executable, metavar="PYTHON", help=text)
    parser.set_defaults(
        run=lambda options: tensors.measure(
            options.tensors, options.many, options.pairs, options.folder, options.safetensors, options.torch
        )
    )


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def _file(text: str) -> str:
    """Return the name of a file to be written, refused now rather than after an hour if it cannot be."""
    if text != "-" and not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder for {text}")
    return text


def _terminate(signal_number: int, frame: FrameType | None) -> None:
    sys.exit(_TERMINATED)


if __name__ == "__main__":
    main()
