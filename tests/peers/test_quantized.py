"""What is dequantized is, bit for bit, what the schemes' own code makes of the same tensors on a processor."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.examples import few
from support.quantized import BFLOAT16, SCALE_TYPES, Sample, awq, fp8, gpt_oss, gptq, int8, mxfp4, nvfp4, packed

from reshard_mpi.engine.dequantize import dequantized
from reshard_mpi.engine.elements import convert_elements
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.sharding.box import Box

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

FLOAT16, FLOAT32, UINT8 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.uint8)


def drawn() -> np.random.Generator:
    return np.random.default_rng(35)


def tensors(sample: Sample) -> dict[str, Any]:
    """Return what is stored as torch's tensors, by the last part of their names."""
    return {name.removeprefix("w."): tensor(array) for name, array in sample.tensors.items()}


def tensor(array: Any) -> Any:
    raw = torch.from_numpy(array.view(f"i{array.itemsize}"))
    return raw.view(getattr(torch, array.dtype.name))


def assert_same(sample: Sample, theirs: Any) -> None:
    """Compare with the type that the scheme's own code gives, to which ours is rounded as every conversion does."""
    weight, dtype = sample.weight, BY_NAME[str(theirs.dtype).removeprefix("torch.")]
    ours = dequantized(weight, Box.whole(weight.shape), sample.kinds, sample.reader())
    assert ours.shape == theirs.shape
    raw = np.empty(ours.size, f"u{dtype.itemsize_bytes}")
    convert_elements(ours.reshape(-1).view(np.uint32), BY_NAME["float32"], raw, dtype)
    expected = theirs.contiguous().reshape(-1)
    numbers = ~expected.isnan().numpy()
    assert numbers.any() and (numbers == ~np.isnan(ours.reshape(-1))).all()
    signed = expected.view(getattr(torch, f"int{8 * dtype.itemsize_bytes}")).numpy()
    np.testing.assert_array_equal(raw[numbers], signed.view(raw.dtype)[numbers])


def test_blocks_of_8_bit_floats_by_the_formula_of_deepseek() -> None:
    sample = fp8(drawn(), (300, 520), (128, 128), FLOAT32)
    weight, scale = tensors(sample).values()
    wide = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :520]
    assert_same(sample, weight.to(torch.float32) * wide)
    assert_same(sample, (weight.to(torch.float32) * wide).to(torch.bfloat16))


@pytest.mark.parametrize("scale_type", SCALE_TYPES, ids=str)
def test_blocks_of_8_bit_floats_in_transformers(scale_type: Any) -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(module, "Fp8Dequantize"):
        pytest.skip("this release of transformers dequantizes elsewhere")
    for shape in ((256, 384), (3, 256, 128)):
        sample = fp8(drawn(), shape, (128, 128), scale_type)
        weight, scale = tensors(sample).values()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert_same(sample, module.Fp8Dequantize(None)._dequantize_one(weight, scale, dtype))


def test_mxfp4_in_transformers() -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    sample = gpt_oss(drawn(), (3, 96, 50))
    for span in (sample.tensors["w_scales"], drawn().integers(0, 255, (3, 50, 3), np.uint8)):
        sample = sample._replace(tensors={**sample.tensors, "w_scales": span})
        blocks, scales = tensors(sample).values()
        assert_same(sample, module.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))
        assert_same(sample, module.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


INTEGERS = {"num_bits": 8, "type": "int"}
FLOATS = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float"}
COMPRESSED = [
    ("float-quantized", {**FLOATS, "strategy": "tensor"}, lambda: fp8(drawn(), (40, 50), (0, 0), BFLOAT16)),
    ("float-quantized", {**FLOATS, "strategy": "channel"}, lambda: fp8(drawn(), (40, 50), (1, 0), FLOAT16)),
    (
        "float-quantized",
        {**FLOATS, "strategy": "block", "block_structure": [16, 24]},
        lambda: fp8(drawn(), (40, 50), (16, 24), BFLOAT16),
    ),
    (
        "float-quantized",
        {**FLOATS, "strategy": "group", "group_size": 16},
        lambda: fp8(drawn(), (40, 64), (1, 16), FLOAT32),
    ),
    (
        "mxfp8-quantized",
        {**FLOATS, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        lambda: fp8(drawn(), (40, 64), (1, 32), UINT8),
    ),
    ("int-quantized", {**INTEGERS, "strategy": "tensor"}, lambda: int8(drawn(), (40, 50), (0, 0), BFLOAT16, False)),
    (
        "int-quantized",
        {**INTEGERS, "strategy": "channel", "symmetric": False},
        lambda: int8(drawn(), (40, 50), (1, 0), BFLOAT16, True),
    ),
    (
        "int-quantized",
        {**INTEGERS, "strategy": "group", "group_size": 16, "symmetric": False},
        lambda: int8(drawn(), (40, 64), (1, 16), FLOAT16, True),
    ),
    *(
        (
            "pack-quantized",
            {**INTEGERS, "num_bits": bits, "strategy": "group", "group_size": 16, "symmetric": not zero},
            lambda bits=bits, zero=zero: packed(drawn(), (45, 80), bits, 16, BFLOAT16, zero),
        )
        for bits in (4, 3, 2, 5, 6, 7, 8)
        for zero in (True, False)
    ),
    (
        "pack-quantized",
        {**INTEGERS, "num_bits": 4, "strategy": "channel", "symmetric": False},
        lambda: packed(drawn(), (45, 77), 4, 0, FLOAT16, True),
    ),
    (
        "nvfp4-pack-quantized",
        {**FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        lambda: nvfp4(drawn(), (40, 80), True),
    ),
    (
        "mxfp4-pack-quantized",
        {**FP4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        lambda: mxfp4(drawn(), (40, 96)),
    ),
]


@pytest.mark.parametrize(("name", "arguments", "make"), few(12, COMPRESSED))
def test_as_compressed_tensors_decompresses(name: str, arguments: dict[str, Any], make: Any) -> None:
    pytest.importorskip("compressed_tensors", minversion="0.20")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    sample = make()
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    stored = tensors(sample)
    assert_same(sample, BaseCompressor.get_value_from_registry(name).decompress(stored, scheme)["weight"])


@pytest.mark.parametrize("bits", [4, 8, 2])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_by_the_formula_of_its_libraries(bits: int, form: str, symmetric: bool) -> None:
    """As AutoGPTQ 0.7.1 and GPTQModel 7.7 have it for 2, 4 and 8 bits; the latter adds the 1 beforehand."""
    sample = gptq(drawn(), (64, 128), bits, 32, FLOAT16, symmetric, True, form)
    words, zeros, scales, index = tensors(sample).values()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    whole = (words[:, None, :] >> shifts[None, :, None] & (1 << bits) - 1).reshape(128, 64)
    points = (zeros[:, :, None] >> shifts & (1 << bits) - 1).reshape(4, 64) + (form == "gptq")
    theirs = scales[index.long()] * (whole.to(torch.int16) - points.to(torch.int16)[index.long()])
    assert theirs.dtype == torch.float16
    assert_same(sample, theirs.T)


def test_as_autoawq_dequantizes() -> None:
    spec = importlib.util.find_spec("awq")
    if spec is None or spec.origin is None:
        pytest.skip("AutoAWQ is not installed")
    # The package itself needs a release of transformers that is long gone, and a graphics card.
    place = Path(spec.origin).parent / "utils/packing_utils.py"
    part = importlib.util.spec_from_file_location("awq_packing", place)
    assert part is not None and part.loader is not None
    packing = importlib.util.module_from_spec(part)
    part.loader.exec_module(packing)
    sample = awq(drawn(), (72, 128), 32, FLOAT16)
    words, zeros, scales = tensors(sample).values()
    assert_same(sample, packing.dequantize_gemm(words, zeros, scales, 4, 32).T)
