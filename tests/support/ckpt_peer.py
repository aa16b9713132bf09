"""MindSpore's checkpoint messages through the protobuf library, with descriptors of our own made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from reshard_mpi.formats.dtypes import BY_MINDSPORE_NAME
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

_FIELD = descriptor_pb2.FieldDescriptorProto


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="peer_checkpoint.proto", package="peer", syntax="proto2")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> None:
        kind = file.message_type.add(name=name)
        for field_name, number, label, field_type, type_name in fields:
            kind.field.add(name=field_name, number=number, label=label, type=field_type, type_name=type_name or None)

    required, optional, repeated = _FIELD.LABEL_REQUIRED, _FIELD.LABEL_OPTIONAL, _FIELD.LABEL_REPEATED
    message(
        "TensorProto",
        ("dims", 1, repeated, _FIELD.TYPE_INT64, ""),
        ("tensor_type", 2, required, _FIELD.TYPE_STRING, ""),
        ("tensor_content", 3, required, _FIELD.TYPE_BYTES, ""),
    )
    message("MapTensorProto", ("tensor", 1, repeated, _FIELD.TYPE_MESSAGE, ".peer.TensorProto"))
    message(
        "Value",
        ("tag", 1, required, _FIELD.TYPE_STRING, ""),
        ("tensor", 2, optional, _FIELD.TYPE_MESSAGE, ".peer.TensorProto"),
        ("maptensor", 3, optional, _FIELD.TYPE_MESSAGE, ".peer.MapTensorProto"),
    )
    message("Checkpoint", ("value", 1, repeated, _FIELD.TYPE_MESSAGE, ".peer.Value"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"peer.{name}"))
        for name in ("Checkpoint", "Value", "TensorProto", "MapTensorProto")
    }


MESSAGES = _messages()


def value(tag: str, dims: tuple[int, ...], type_name: str, content: bytes) -> bytes:
    """Return a checkpoint of one Value."""
    checkpoint = MESSAGES["Checkpoint"]()
    item = checkpoint.value.add(tag=tag)
    item.tensor.dims.extend(dims)
    item.tensor.tensor_type = type_name
    item.tensor.tensor_content = content
    return bytes(checkpoint.SerializeToString())


def write(path: Path, contents: ShardContents, *, pieces: int = 1) -> None:
    """Write a checkpoint, every tensor in so many pieces (cut anywhere, as long as there are bytes)."""
    with path.open("wb") as file:
        for tensor in contents.tensors.values():
            step = max(1, -(-len(tensor.content) // pieces))
            for number in range(0, max(1, len(tensor.content)), step):
                file.write(
                    value(tensor.name, tensor.shape, tensor.dtype.mindspore, tensor.content[number : number + step])
                )
        for name, text in contents.strings.items():
            file.write(value(name, (0,), "str", text.encode("utf-32-le") or bytes(4)))
        if not file.tell():
            file.write(b"crc_num" + bytes(10))


def read(path: Path) -> ShardContents:
    """Read a checkpoint, joining pieces."""
    content = path.read_bytes()
    if content[-17:-10] == b"crc_num":
        content = content[:-17]
    checkpoint = MESSAGES["Checkpoint"].FromString(content)
    joined: dict[str, Any] = {}
    for item in checkpoint.value:
        dims, type_name = tuple(item.tensor.dims), item.tensor.tensor_type
        before = joined.get(item.tag, (dims, type_name, b""))
        assert before[:2] == (dims, type_name)
        joined[item.tag] = (dims, type_name, before[2] + item.tensor.tensor_content)
    strings = {tag: c.decode("utf-32-le").rstrip("\0") for tag, (_, kind, c) in joined.items() if kind == "str"}
    tensors = (
        SampleTensor(tag, BY_MINDSPORE_NAME[kind], dims, c) for tag, (dims, kind, c) in joined.items() if kind != "str"
    )
    return ShardContents.of(tensors, strings)
