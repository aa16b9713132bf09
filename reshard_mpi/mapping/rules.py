"""What a map file says: equations, and what is left out, made up or computed beside them."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.mapping.names import NamePattern
from reshard_mpi.mapping.settings import Caution, Count, Number
from reshard_mpi.mapping.syntax import Equation

# The names of types in equations and options, and those of the types.
TYPES = {
    "fp64": BY_NAME["float64"],
    "fp32": BY_NAME["float32"],
    "fp16": BY_NAME["float16"],
    "bf16": BY_NAME["bfloat16"],
    "fp8_e4m3": BY_NAME["float8_e4m3fn"],
    "fp8_e5m2": BY_NAME["float8_e5m2"],
}


class EquationRule(NamedTuple):
    """An equation that tensors are taken through.

    shared: the captures in all its names. is_optional: whether it may apply nowhere, or where only some of its tensors
    are there. copies: whether the one tensor of one side is each of those on the other. drops_pads: whether padding
    that is not zero is thrown away. where: its place in the file. like: what it is without a checkpoint that the target
    is to be like: "only": it does not apply then; "needed": where it could apply, nothing tells whether it does;
    "forward": as "needed" if it is read forward, and backward as without this. warning: what people are told where it
    applies.
    """

    equation: Equation
    shared: tuple[str, ...]
    is_optional: bool
    copies: bool
    drops_pads: bool
    where: str
    like: str | None = None
    warning: str = ""

    @property
    def keeps_names(self) -> bool:
        """Whether the tensors have the same names on both sides."""
        left, right = ([term.name.text for term in side] for side in (self.equation.left, self.equation.right))
        return left == right


class Drop(NamedTuple):
    """Tensors of one side that are left out.

    is_optional: whether they need not be made up on the way back. are_zeros: whether they may hold only zeros.
    """

    glob: str
    side: str
    is_optional: bool
    where: str
    are_zeros: bool = False


class Fill(NamedTuple):
    """A tensor of one side that is made up: all elements are `element`.

    beside: makes one for each tensor of that name, whose captures the name may have. shape, dtype: None: those of the
    tensor beside it. needs_like: it is made up only if the checkpoint that the target is to be like has it.
    is_optional: whether there may be nothing that it is beside.
    """

    name: NamePattern
    beside: NamePattern | None
    shape: tuple[int, ...] | None
    dtype: DType | None
    value: int | float
    side: str
    where: str
    needs_like: bool = False
    is_optional: bool = False

    def element(self, dtype: DType) -> bytes:
        """Return the bytes of an element. Raises MapError if the type cannot hold the value."""
        return bytes_of(self.value, dtype, self.name.text, self.where)


def bytes_of(value: int | float, dtype: DType, name: str, where: str) -> bytes:
    """Return the bytes of an element that is made up. Raises MapError if the type cannot hold the value."""
    code = _CODES.get(dtype.name)
    try:
        if dtype.name == "bfloat16":  # the upper half of a float32, rounded to nearest even
            (bits,) = struct.unpack("=I", struct.pack("=f", value))
            upper = bits + 0x7FFF + (bits >> 16 & 1) >> 16
            if upper & 0x7FFF == _BFLOAT16_INFINITY and math.isfinite(value):
                raise struct.error("too large")
            return struct.pack("=H", upper)
        if code is None and value != 0:
            raise struct.error("only zeros can be made up in this type")
        if code is None:
            return bytes(dtype.itemsize_bytes)
        integral = code not in "efd"
        if integral and value != int(value):
            raise struct.error("no integer")
        if dtype.name == "bool" and value not in (0, 1):
            raise struct.error("neither 0 nor 1")
        return struct.pack(f"={code}", int(value) if integral else float(value))
    except (struct.error, ValueError, OverflowError) as error:
        raise MapError(
            f"{name} cannot be made up of {value} in {dtype.name}",
            expected="a value that the type can hold",
            got=str(error),
            where=where,
            remedy="give another value, or another type",
        ) from None


_BFLOAT16_INFINITY = 0x7F80
_CODES = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
    "float16": "e", "float32": "f", "float64": "d", "bool": "?",
}  # fmt: skip


class Rules(NamedTuple):
    """What a map file says.

    is_typed: whether it is no file but an equation that the user has typed. states: equations of what is before and
    behind a parameter's name in that of its state. axes: the lengths that it gives. where: the file. lacks_config:
    whether it gives others by the configuration of the model, and there is none.
    tensor_parallel: how many tensor-parallel ranks the configuration says there are; None: it says nothing.
    cuts_by_rank: whether an axis has that length, so that tensors have a part for each of these ranks.
    """

    equations: tuple[EquationRule, ...]
    drops: tuple[Drop, ...]
    fills: tuple[Fill, ...]
    axes: Mapping[str, int]
    where: str
    lacks_config: bool = False
    states: tuple[EquationRule, ...] = ()
    counts: tuple[Count, ...] = ()
    numbers: tuple[Number, ...] = ()
    cautions: tuple[Caution, ...] = ()
    is_typed: bool = False
    tensor_parallel: int | None = None
    cuts_by_rank: bool = False
