"""Reads and writes the safetensors format: as much of it as the oracle needs."""

import json
import struct

import numpy
import torch

_DTYPES = {
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def save(path, tensors):
    """Equal tensors give equal bytes. Wide elements first, so that each lies aligned."""
    header, blobs, offset = {}, [], 0
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in order:
        tensor = tensor.detach().contiguous()
        blob = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def load(path):
    with open(path, "rb") as stream:
        data = stream.read()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        raw = numpy.frombuffer(data[8 + length + start : 8 + length + end], numpy.uint8).copy()
        tensor = torch.from_numpy(raw).view(_DTYPES[entry["dtype"]])
        tensors[name] = tensor.reshape(entry["shape"])
    return tensors
