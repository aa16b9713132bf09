"""MindSpore's strategy messages, made at run time.

The messages are those of MindSpore's `node_strategy.proto` (package `mindspore.straspb`, proto2, repeated numbers not
packed). Classes generated from that file insist on one protobuf runtime, and two programs that register the same
message names in the default pool of one process collide: hence descriptors built here, in a pool of our own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

__all__ = ["DecodeError", "StrategyMessages", "messages"]

PACKAGE = "mindspore.straspb"

# message -> (field number, label, type, name); a type that is not a scalar is a message of this package.
_MESSAGES: dict[str, tuple[tuple[int, str, str, str], ...]] = {
    "ParallelStrategy": ((1, "repeated", "uint32", "dim"),),
    "ParallelStrategys": ((1, "required", "uint32", "stage"), (2, "repeated", "ParallelStrategy", "parallel_strategy")),
    "ParallelStrategyItem": (
        (1, "required", "string", "node_name"),
        (2, "required", "ParallelStrategys", "parallel_strategys"),
    ),
    "DevMatrix": ((1, "repeated", "uint32", "dim"),),
    "TensorMap": ((1, "repeated", "int32", "dim"),),
    "ParamSplitShape": ((1, "repeated", "int64", "dim"),),
    "IndicesOffset": ((1, "repeated", "int64", "dim"),),
    "ParallelLayouts": (
        (1, "repeated", "DevMatrix", "dev_matrix"),
        (2, "repeated", "TensorMap", "tensor_map"),
        (3, "repeated", "ParamSplitShape", "param_split_shape"),
        (4, "repeated", "IndicesOffset", "indices_offset"),
        (5, "required", "int32", "field"),
        (6, "required", "int32", "opt_weight_shard_step"),
        (7, "required", "int32", "opt_weight_shard_size"),
    ),
    "ParallelLayoutItem": (
        (1, "required", "string", "param_name"),
        (2, "required", "ParallelLayouts", "parallel_layouts"),
    ),
    "ParallelGroupRanks": ((1, "repeated", "uint32", "dim"),),
    "ParallelGroupItem": (
        (1, "required", "string", "group_name"),
        (2, "required", "ParallelGroupRanks", "parallel_group_ranks"),
    ),
    "ParallelGroupMap": (
        (1, "repeated", "ParallelGroupItem", "parallel_group_item"),
        (2, "required", "ParallelGroupRanks", "ckpt_restore_rank_list"),
    ),
    "ParallelStrategyMap": (
        (1, "required", "uint32", "current_stage"),
        (2, "repeated", "ParallelStrategyItem", "parallel_strategy_item"),
        (3, "repeated", "ParallelLayoutItem", "parallel_layout_item"),
    ),
}


class StrategyMessages(NamedTuple):
    """The two message classes that are whole files, and those of a strategy's items."""

    strategy_map: Any
    group_map: Any
    strategy_item: Any
    layout_item: Any


@lru_cache(maxsize=1)
def messages() -> StrategyMessages:
    """Return the message classes, built once per process."""
    field = descriptor_pb2.FieldDescriptorProto
    labels = {"required": field.LABEL_REQUIRED, "repeated": field.LABEL_REPEATED}
    scalars = {
        "int32": field.TYPE_INT32,
        "int64": field.TYPE_INT64,
        "string": field.TYPE_STRING,
        "uint32": field.TYPE_UINT32,
    }
    file = descriptor_pb2.FileDescriptorProto(name="node_strategy.proto", package=PACKAGE, syntax="proto2")
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for number, label, kind, name in fields:
            made = message.field.add(name=name, number=number, label=labels[label])
            if kind in scalars:
                made.type = scalars[kind]
            else:
                made.type = field.TYPE_MESSAGE
                made.type_name = f".{PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())

    def made_class(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    names = ("ParallelStrategyMap", "ParallelGroupMap", "ParallelStrategyItem", "ParallelLayoutItem")
    return StrategyMessages(*map(made_class, names))
