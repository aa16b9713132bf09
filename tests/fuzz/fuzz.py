"""Coverage-guided fuzzing of one parser: `python tests/fuzz/fuzz.py PARSER [FOLDER...] [libFuzzer options]`.

Needs atheris (`pip install atheris`), which neither the package nor its tests need. PARSER is a name of
`parsers.PARSERS`. New inputs go to the first FOLDER, where there is none to a temporary one; `tests/fuzz/corpus/PARSER`
is always read. An input that does harm is written to `./crash-...` and the script ends; when the defect is mended, the
input belongs into the corpus, which `tests/formats/test_hostile_fuzz.py` replays. Useful options: -max_total_time=600,
-timeout=5 (seconds an input may take), -rss_limit_mb=1024, -max_len=20000.
"""

from __future__ import annotations

import sys
import tempfile

import atheris

with atheris.instrument_imports(include=["reshard_mpi", "tomllib", "json", "fnmatch"]):
    # What is imported while something runs would not be followed.
    import parsers

    import reshard_mpi.formats.ckpt
    import reshard_mpi.formats.dcp
    import reshard_mpi.formats.hdf5
    import reshard_mpi.formats.safetensors
    import reshard_mpi.formats.safetensors.huggingface
    import reshard_mpi.formats.safetensors.mindformers_index
    import reshard_mpi.formats.safetensors.torch_dcp
    import reshard_mpi.formats.torch
    import reshard_mpi.mapping.apply_rules
    import reshard_mpi.sharding.mindspore_protobuf
    import reshard_mpi.sharding.strategy_files
    import reshard_mpi.sharding.toml_spec  # noqa: F401


def main() -> None:
    """Fuzz the parser that the first argument names."""
    if len(sys.argv) < 2 or sys.argv[1] not in parsers.PARSERS:
        sys.exit(f"{__doc__}\nparsers: {', '.join(parsers.PARSERS)}")
    name = sys.argv.pop(1)
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    options = [argument for argument in sys.argv[1:] if argument.startswith("-")]
    folders = folders or [tempfile.mkdtemp()]
    atheris.Setup([sys.argv[0], *options, *folders, str(parsers.corpus(name)[0].parent)], parsers.PARSERS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
