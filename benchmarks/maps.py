"""Checkpoints taken through maps, beside `cp`: queries, keys, values and experts regrouped, all turned, all cast.

The largest real model is planned only, from files that hold names and shapes and no payloads.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint import generate
from benchmarks.interleave import Comparison, warmed_up
from benchmarks.machine import describe
from benchmarks.measure import PROGRAMS, Run, settle
from benchmarks.measure import measure as measure_commands
from benchmarks.network import ITEM_BYTES, Resharding, Shapes
from benchmarks.peers.cp import Cp
from benchmarks.peers.ours import Between
from benchmarks.peers.protocol import Peer
from benchmarks.planning import Program
from benchmarks.results import Results
from benchmarks.rows import Clock, Question, alone, answer, largest_process
from benchmarks.workplace import workplace
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

_RANKS, _TARGETS = 4, 2
_EXPERTS, _GROUPS, _PER_GROUP = 8, 8, 4
_EXPERTS_OF_LARGEST = 256
_REGROUPED = f"""
[axes]
g = {_GROUPS}
r = {_PER_GROUP}
[[map]]
eq = '''layers.{{l}}.q [(g r d) h], layers.{{l}}.k [(g d) h], layers.{{l}}.v [(g d) h]
    <=> blocks.{{l}}.qkv [(g (r d + d + d)) h]'''
[[map]]
eq = "layers.{{l}}.experts.{{e}}.gate [f h], layers.{{l}}.experts.{{e}}.up [f h] <=> blocks.{{l}}.gate_up [e (f + f) h]"
"""
_TURNED = """
[[map]]
eq = "{p*}.gate [f h] <=> {p*}.gate_t [h f]"
[[map]]
eq = "{p*}.up [f h] <=> {p*}.up_t [h f]"
[[map]]
eq = '''layers.{l}.q [n h], layers.{l}.k [m h], layers.{l}.v [m h]
    <=> blocks.{l}.q [h n], blocks.{l}.k [h m], blocks.{l}.v [h m]'''
"""
_GATE_AND_UP = """
[[map]]
eq = '''model.layers.{l}.mlp.experts.{e}.gate_proj.weight [f h], model.layers.{l}.mlp.experts.{e}.up_proj.weight [f h]
    <=> model.layers.{l}.mlp.experts.gate_up_proj [e (f + f) h]'''
"""
_STACKED = f"""{_GATE_AND_UP}
[[map]]
eq = "model.layers.{{l}}.mlp.experts.{{e}}.down_proj.weight [h f] <=> model.layers.{{l}}.mlp.experts.down_proj [e h f]"
"""
_BFLOAT16_BYTES = 2
_MEMORY, _ZEROS = Path("/dev/shm"), bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Warmed:
    """A side that finds memory for what it writes that was in use a moment ago, in a folder in memory.

    What has been free for some seconds a virtual machine may have given back, and it takes several times as long to get
    it anew: of two sides the one would pay for it that writes more than its own last run has left behind.
    """

    side: Peer
    folder: Path
    size_bytes: int

    @property
    def name(self) -> str:
        return self.side.name

    def missing(self) -> str | None:
        return self.side.missing()

    def run(self) -> Run:
        if _MEMORY.is_dir() and _MEMORY.samefile(self.folder.parent):
            used = self.folder / "used"
            with used.open("wb") as stream:
                for _ in range(0, self.size_bytes, len(_ZEROS)):
                    stream.write(_ZEROS)
            used.unlink()
        return self.side.run()


@dataclass(frozen=True, slots=True)
class Planned:
    """`reshard_mpi.plan` of one target rank, by a process of its own. arguments: of the program, besides the source."""

    source: Path
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return "plan of one rank"

    def missing(self) -> str | None:
        return None

    def run(self) -> Run:
        settle(self.source.parent)
        program = str(PROGRAMS / "plan_through_map.py")
        return measure_commands([[sys.executable, program, str(self.source), *self.arguments]]).run


def measure(megabytes: int, pairs: int, folder: Path | None) -> Results:
    """Measure beside `cp` at one size, and plan the largest model."""
    network = _network(megabytes)
    with workplace(folder, 4 * megabytes * 1_000_000) as place:
        machine = describe(place)
        made = generate(place, network, Resharding("4 -> 2", _by_rows(network), None), "safetensors")
        output, beside = place / "dst", place / "beside"
        for name, text in (("regrouped", _REGROUPED), ("turned", _TURNED)):
            (place / f"{name}.toml").write_text(text)
        strategies = ("--src-strategy", str(made.src_strategy), "--dst-strategy", str(_target(place)))
        size = f"{made.size_bytes / 1e6:.0f} MB safetensors, {_RANKS} -> {_TARGETS}"
        sides = {
            "regrouped": ("QKV and experts regrouped", ("--map", str(place / "regrouped.toml")), output),
            "turned": ("all of it transposed", ("--map", str(place / "turned.toml")), output),
            "cast": ("fp32 -> bf16", ("--dtype", "bf16"), made.source),
        }
        questions = []
        for key, (what, options, copied) in sides.items():
            ours = Between("--jobs 2", made.source, output, (*strategies, *options, "--jobs", "2"))
            both = (Warmed(side, place, made.size_bytes) for side in (ours, Cp(copied, beside, 2)))
            comparison = Comparison(*both)
            questions.append(Question(comparison, f"maps.{key}", f"{size}, {what}: whole command", megabytes))
        rows = answer(questions, pairs)
        runs = [run for question in questions for run in question.comparison.our_runs]
        shutil.rmtree(made.source)
        planned = _plan_of_largest(place)
        planning = warmed_up(planned.run, pairs)
        (place / "experts.toml").write_text(_GATE_AND_UP)
        compiled = Program("experts_mapped", (str(place / "experts.toml"),))
        compiling = warmed_up(compiled.run, pairs)
    what = "DeepSeek-V3 from Hugging Face to experts stacked, EP 8 x TP 4 x PP 4, one rank"
    rows.append(alone("maps.plan", f"{what}: plan", planned.name, planning))
    rows.append(alone("maps.plan.memory", f"{what}: peak memory", planned.name, planning))
    what = "29,696 tensors of experts stacked: the map compiled"
    rows.append(alone("maps.compile", what, "map of 29,696 tensors", compiling, Clock.INNER))
    return Results("maps", machine, pairs, [*rows, largest_process("maps.memory", runs)])


def _network(megabytes: int) -> Shapes:
    """Return layers of a mixture of experts that take together about so much."""
    hidden = 4096 if megabytes >= 1000 else 64
    layer: Shapes = {"q": (hidden, hidden), "k": (hidden // _PER_GROUP, hidden), "v": (hidden // _PER_GROUP, hidden)}
    for expert in range(_EXPERTS):
        layer |= {f"experts.{expert}.{part}": (hidden // 2, hidden) for part in ("gate", "up")}
    layer_bytes = ITEM_BYTES * sum(math.prod(shape) for shape in layer.values())
    layers = max(1, round(megabytes * 1_000_000 / layer_bytes))
    return {f"layers.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}


def _by_rows(network: Shapes) -> Strategy:
    return Strategy(_RANKS, 1, {name: (Placement((_RANKS,), ((0,), ())),) for name in network})


def _target(folder: Path) -> Path:
    """Write the target's strategy: everything is cut along its first dimension."""
    path = folder / "target.toml"
    path.write_text(f'[mesh]\ntp = {_TARGETS}\n[[parameter]]\nmatch = "*"\nsplit = {{ 0 = ["tp"] }}\n')
    return path


def _plan_of_largest(folder: Path) -> Planned:
    """Write DeepSeek-V3's names and shapes as a Hugging Face folder of files without payloads, a map and a strategy."""
    source = folder / "largest"
    source.mkdir()
    _write_sparse(source, _largest())
    (folder / "stacked.toml").write_text(_STACKED)
    rules = ["stages = 4", "[mesh]", "ep = 8", "tp = 4"]

    def rule(match: str, stage: int, split: str = "") -> None:
        rules.extend(["[[parameter]]", f'match = "{match}"', f"stage = {stage}", "optional = true", split])

    for layer in range(61):
        stage = min(layer // 16, 3)
        rule(f"model.layers.{layer}.mlp.experts.*", stage, 'split = { 0 = ["ep"] }')
        rule(f"model.layers.{layer}.self_attn.*_b_proj.weight", stage, 'split = { 0 = ["tp"] }')
        rule(f"model.layers.{layer}.*", stage)
    rule("model.embed_tokens.weight", 0, 'split = { 0 = ["tp"] }')
    rule("lm_head.weight", 3, 'split = { 0 = ["tp"] }')
    rule("model.norm.weight", 3)
    (folder / "stages.toml").write_text("\n".join(rules))
    return Planned(source, (str(folder / "stacked.toml"), str(folder / "stages.toml"), "100"))


def _largest() -> Shapes:
    """Return the tensors of DeepSeek-V3: 61 layers, of which 58 have 256 experts and one that all share."""
    hidden, narrow, wide = 7168, 2048, 18432
    network: Shapes = {"model.embed_tokens.weight": (129280, hidden)}

    def feed_forward(prefix: str, width: int) -> Shapes:
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        return {f"{prefix}.{part}_proj.weight": shape for part, shape in shapes.items()}

    for layer in range(61):
        prefix = f"model.layers.{layer}"
        network |= {
            f"{prefix}.self_attn.q_a_proj.weight": (1536, hidden),
            f"{prefix}.self_attn.q_a_layernorm.weight": (1536,),
            f"{prefix}.self_attn.q_b_proj.weight": (24576, 1536),
            f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": (576, hidden),
            f"{prefix}.self_attn.kv_a_layernorm.weight": (512,),
            f"{prefix}.self_attn.kv_b_proj.weight": (32768, 512),
            f"{prefix}.self_attn.o_proj.weight": (hidden, 16384),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
        if layer < 3:
            network |= feed_forward(f"{prefix}.mlp", wide)
            continue
        for expert in range(_EXPERTS_OF_LARGEST):
            network |= feed_forward(f"{prefix}.mlp.experts.{expert}", narrow)
        network |= feed_forward(f"{prefix}.mlp.shared_experts", narrow)
        network |= {f"{prefix}.mlp.gate.weight": (256, hidden), f"{prefix}.mlp.gate.e_score_correction_bias": (256,)}
    return network | {"model.norm.weight": (hidden,), "lm_head.weight": (129280, hidden)}


def _write_sparse(folder: Path, network: Shapes) -> None:
    """Write files of 4.3 GB each that hold tensors of bfloat16, as their headers say, and nothing on the disk."""
    files: list[Shapes] = [{}]
    filled_bytes = 0
    for name, shape in network.items():
        size_bytes = _BFLOAT16_BYTES * math.prod(shape)
        if files[-1] and filled_bytes + size_bytes > 4_300_000_000:
            files.append({})
            filled_bytes = 0
        files[-1][name] = shape
        filled_bytes += size_bytes
    weight_map, total_bytes = {}, 0
    for number, held in enumerate(files, 1):
        path = folder / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header, end = {}, 0
        for name, shape in held.items():
            begin, end = end, end + _BFLOAT16_BYTES * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
            weight_map[name] = path.name
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        total_bytes += end
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
