#!/usr/bin/env python3
# Length: one file, which users copy into their programs, beside xxh3.py.
"""Turns our checkpoints into state_dicts of PyTorch, and back.

    ddp_checkpoint.py export CHECKPOINT OUT.pt
    ddp_checkpoint.py import IN.pt FOLDER [--step=N] [--epoch=N] [--run-id=ID] ...

In a Python program:

    import ddp_checkpoint
    saved = ddp_checkpoint.read("checkpoints")              # its newest checkpoint, verified
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    ...
    ddp_checkpoint.save("checkpoints", model, optimizer, step=1200)

Needs Python and torch. docs/checkpoint-format.md explains the format, and what goes over. An OUT.pt
is a dict of tensors, numbers, texts, lists and dicts, which torch.load(weights_only=True) opens:
"model", "optimizer", "step", "epoch" and so on, as read() returns them.
"""

import argparse
import json
import os
import pickle
import re
import secrets
import sys
import time

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from xxh3 import xxh3_128  # noqa: E402  (found beside this file)

MANIFEST = "MANIFEST.json"
FORMAT_VERSION = 1
FILE_BYTES = 1 << 30  # a larger tensor has a file of its own
ALIGNMENT = 4096
_NAME = re.compile(r"step-(\d{12,})\.g(\d{4,})")
_TRAILER = ',\n"manifest_xxh3_128": "%s"\n}\n'
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What a state_dict of Python has and a manifest has not, with the value that ours means. Another
# value cannot be imported.
_FIXED_OPTIONS = {
    "SGD": {"maximize": False},
    "Adam": {"maximize": False, "decoupled_weight_decay": False},
    "AdamW": {"maximize": False, "decoupled_weight_decay": True},
}
# How PyTorch computes, not what: not saved.
_MEANS = ("foreach", "fused", "capturable", "differentiable")
_OPTIONS = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Adam": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "AdamW": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
}
_STATES = {
    "SGD": ("momentum_buffer",),
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}


class CheckpointError(Exception):
    """Why a checkpoint cannot be read or written: one line."""


# ---- Reading ----


def find(path):
    """The folder of the checkpoint that `path` means: itself, or the newest one in it."""
    path = path.rstrip("/") or "/"
    if _NAME.fullmatch(os.path.basename(path)) or os.path.isfile(os.path.join(path, MANIFEST)):
        return path
    try:
        names = os.listdir(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    found = [(int(m[1]), int(m[2]), m[0]) for m in map(_NAME.fullmatch, names) if m]
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint")
    return os.path.join(path, max(found)[2])


def read_manifest(folder):
    """The fields of a checkpoint's manifest, whose own hash is checked."""
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, "rb") as stream:
            text = stream.read()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    size = len(_TRAILER % ("0" * 32))
    body = text[:-size]
    if text[-size:].decode("utf-8", "replace") != _TRAILER % xxh3_128(body):
        raise CheckpointError(f"{path}: the manifest does not match its own XXH3-128")
    manifest = json.loads(text)
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format version {manifest['format_version']} is unknown")
    return manifest


def _part(file):
    return file.split("-")[0]


def read_tensors(folder, manifest, verify=True):
    """The tensors of each part, "model", "optimizer" and "extra", by name."""
    parts = {"model": {}, "optimizer": {}, "extra": {}}
    for file in manifest["files"]:
        path = os.path.join(folder, file["name"])
        try:
            size = os.path.getsize(path)
            with open(path, "rb") as stream:
                for record in manifest["tensors"]:
                    if record["file"] != file["name"]:
                        continue
                    data = bytearray(record["bytes"])
                    stream.seek(record["offset"])
                    if stream.readinto(data) != len(data):
                        raise CheckpointError(f"{path}: tensor {record['name']} is cut off")
                    if verify and xxh3_128(data) != record["xxh3_128"]:
                        raise CheckpointError(f"{path}: tensor {record['name']} is damaged")
                    parts[_part(file["name"])][record["name"]] = _tensor(record, data)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        if size != file["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, the manifest says {file['bytes']}")
    return parts


def _tensor(record, data):
    dtype = _DTYPES.get(record["dtype"])
    if dtype is None:
        raise CheckpointError(f"tensor {record['name']}: no dtype {record['dtype']} in torch")
    if not data:
        return torch.empty(record["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(record["shape"])


def _optimizer_state_dict(record, tensors):
    """The optimizer's state_dict. Parameters have numbers in the order of the groups."""
    kind = record["type"]
    if kind not in _OPTIONS:
        raise CheckpointError(f"an optimizer {kind} is unknown: SGD, Adam or AdamW is expected")
    state, groups, number = {}, [], 0
    for group in record["param_groups"]:
        numbers = []
        for name in group["parameters"]:
            entry = {}
            for key in _STATES[kind] + (("step",) if kind != "SGD" else ()):
                tensor = tensors.get(f"state.{name}.{key}")
                if tensor is not None:
                    entry[key] = tensor
            if kind != "SGD" and name in record["steps"]:
                # The tensor holds a float; the record has the exact number.
                entry["step"] = torch.tensor(float(record["steps"][name]))
            if entry:
                state[number] = entry
            numbers.append(number)
            number += 1
        options = {key: group["options"][key] for key in _OPTIONS[kind]}
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        options.update(_FIXED_OPTIONS[kind], foreach=None, differentiable=False, fused=None)
        if kind != "SGD":
            options["capturable"] = False
        groups.append({**options, "param_names": list(group["parameters"]), "params": numbers})
    return {"state": state, "param_groups": groups}


def read(path, verify=True):
    """A checkpoint as a dict, for torch.save() and load_state_dict().

    `path`: the folder of a checkpoint, or of all checkpoints of a job: then the newest.
    `verify`: compares each tensor with its hash.

    "model": its state_dict, tied tensors under each of their names. "optimizer": its state_dict, or
    None. "optimizer_type": "SGD", "Adam" or "AdamW". "step", "epoch", "generation", "run_id",
    "world_size", "sampler", "bucket_layout", "metric": as in the manifest. "rng": the states of the
    generators by name, such as "rng.cpu.0" for torch.set_rng_state() of rank 0.
    """
    folder = find(path)
    manifest = read_manifest(folder)
    match = _NAME.fullmatch(os.path.basename(folder))
    if match and (int(match[1]), int(match[2])) != (manifest["step"], manifest["generation"]):
        raise CheckpointError(f"{folder} holds the manifest of another checkpoint")
    parts = read_tensors(folder, manifest, verify)
    model = parts["model"]
    for alias, name in manifest["aliases"].items():
        model[alias] = model[name]
    optimizer = manifest["optimizer"]
    return {
        "model": model,
        "optimizer": _optimizer_state_dict(optimizer, parts["optimizer"]) if optimizer else None,
        "optimizer_type": optimizer["type"] if optimizer else None,
        **{key: manifest[key] for key in ("step", "epoch", "generation", "run_id", "world_size")},
        **{key: manifest[key] for key in ("sampler", "bucket_layout")},
        "metric": manifest.get("metric"),
        "rng": parts["extra"],
    }


# ---- Writing ----


def _record_of_optimizer(state_dict, kind, names):
    """The manifest's record of an optimizer, and its tensors by name."""
    record = {"type": kind, "param_groups": [], "steps": {}}
    tensors = {}
    for group in state_dict["param_groups"]:
        for option, value in _FIXED_OPTIONS[kind].items():
            if group.get(option, value) != value:
                raise CheckpointError(f"{kind} with {option}={group[option]} is unknown to ours")
        unknown = set(group) - {*_OPTIONS[kind], *_FIXED_OPTIONS[kind], *_MEANS}
        unknown -= {"params", "param_names", "initial_lr"}
        if unknown:
            raise CheckpointError(f"{kind} with the option {min(unknown)} is unknown to ours")
        options = {}
        for option in _OPTIONS[kind]:
            value = group[option]
            if option == "betas":
                options[option] = [float(beta) for beta in value]
            else:
                options[option] = bool(value) if isinstance(value, bool) else float(value)
        group_names = [names[number] for number in group["params"]]
        record["param_groups"].append({"parameters": group_names, "options": options})
    for number, entry in state_dict["state"].items():
        name = names[number]
        for key in _STATES[kind]:
            if entry.get(key) is not None:
                tensors[f"state.{name}.{key}"] = entry[key]
        if kind != "SGD" and entry:
            steps = int(entry["step"])
            record["steps"][name] = steps
            tensors[f"state.{name}.step"] = torch.tensor(float(steps))
    return record, tensors


def _kind_of(state_dict):
    """The kind of optimizer that has such a state_dict."""
    group = state_dict["param_groups"][0]
    if "momentum" in group and "dampening" in group:
        return "SGD"
    if "betas" in group and "amsgrad" in group and "decoupled_weight_decay" in group:
        return "AdamW" if group["decoupled_weight_decay"] else "Adam"
    raise CheckpointError("name the optimizer: SGD, Adam or AdamW; its state_dict does not tell")


def _names_of(state_dict, model, parameter_names):
    """The names of the optimizer's parameters, by number."""
    count = sum(len(group["params"]) for group in state_dict["param_groups"])
    if parameter_names is None:
        groups = state_dict["param_groups"]
        if all(group.get("param_names") for group in groups):
            names = {}
            for group in groups:
                names.update(zip(group["params"], group["param_names"]))
            return names
        parameter_names = [
            name
            for name, tensor in model.items()
            if tensor.is_floating_point() and not name.endswith(("running_mean", "running_var"))
        ]
        if len(parameter_names) != count:
            raise CheckpointError(
                f"the optimizer has {count} parameters, the model {len(parameter_names)} tensors"
                " that may be parameters: give parameter_names"
            )
    names = dict(enumerate(parameter_names))
    for number, entry in state_dict["state"].items():
        for key, value in entry.items():
            if key == "step" or not torch.is_tensor(value):
                continue
            if value.shape != model[names[number]].shape:
                raise CheckpointError(
                    f"state {key} of parameter {number} has another shape than"
                    f" {names[number]}: give parameter_names"
                )
    return names


def _check(tensors):
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(f"tensor {name}: {tensor.dtype}, {tensor.layout} is not saved")


def _without_aliases(tensors):
    """Tensors that are tied are saved once: under the first name."""
    kept, aliases, first = {}, {}, {}
    for name, tensor in tensors.items():
        shared = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and shared in first:
            aliases[name] = first[shared]
            continue
        first[shared] = name
        kept[name] = tensor
    return kept, aliases


def _files_of(kind, tensors):
    """Cuts tensors into files: pairs of a name and its tensors."""
    pieces, size = [], 0
    for name, tensor in tensors.items():
        if not pieces or size + tensor.nbytes > FILE_BYTES:
            pieces.append({})
            size = 0
        pieces[-1][name] = tensor
        size += tensor.nbytes
    if not pieces and kind == "model":
        pieces = [{}]
    count = len(pieces)
    return [(f"{kind}-{i + 1:05}-of-{count:05}.safetensors", p) for i, p in enumerate(pieces)]


def _bytes_of(tensor):
    tensor = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return bytearray()
    return bytearray(tensor.reshape(-1).view(torch.uint8).numpy())


def _sync(path, flags=os.O_RDONLY):
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_file(folder, name, tensors):
    """Writes a safetensors file durably; returns the manifest's records of it."""
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key.encode()))
    blobs, header, offset = [], {"__metadata__": {"format": "pt"}}, 0
    for key in order:
        tensor = tensors[key]
        blob = _bytes_of(tensor)
        header[key] = {
            "data_offsets": [offset, offset + len(blob)],
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    whole = bytearray(len(text).to_bytes(8, "little") + text)
    begin = len(whole)
    for blob in blobs:
        whole += blob
    with open(os.path.join(folder, name), "xb") as stream:
        stream.write(whole)
        stream.flush()
        os.fsync(stream.fileno())
    records = [
        {
            "name": key,
            "file": name,
            "dtype": header[key]["dtype"],
            "shape": header[key]["shape"],
            "offset": begin + header[key]["data_offsets"][0],
            "bytes": len(blob),
            "xxh3_128": xxh3_128(blob),
        }
        for key, blob in zip(order, blobs)
    ]
    return {"name": name, "bytes": len(whole), "xxh3_128": xxh3_128(whole)}, records


def _state_hash(records):
    lines = [
        f"{r['name']}\n{r['dtype']} {r['shape']}\n{r['xxh3_128']}\n".encode()
        for r in records
        if _part(r["file"]) != "extra"
    ]
    return xxh3_128(b"".join(sorted(lines)))


def _manifest_text(fields):
    def line(value):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    texts = []
    for key, value in fields.items():
        if key in ("files", "tensors"):
            text = "[" + ",".join("\n  " + line(record) for record in value) + "]"
        else:
            text = line(value)
        texts.append(f'"{key}": {text}')
    body = "{\n" + ",\n".join(texts)
    return body + _TRAILER % xxh3_128(body.encode())


def write(
    folder,
    model,
    optimizer=None,
    *,
    step,
    epoch=0,
    optimizer_type=None,
    parameter_names=None,
    generation=0,
    run_id="",
    sampler=None,
    bucket_layout=(),
    metric=None,
    rng=None,
    world_size=1,
):
    """Writes a checkpoint into `folder`, which holds all checkpoints of a job; returns its path.

    `model`, `optimizer`: state_dicts. `optimizer_type`: "SGD", "Adam" or "AdamW", where the
    state_dict does not tell. `parameter_names`: names in `model` of the optimizer's parameters, in
    its order; by default those of the state_dict's groups ("param_names"), or all floating tensors
    but running statistics. The others: as read() returns them. A job goes on from the checkpoint of
    the highest step; `generation` decides between equal steps. `run_id`: of the job that is to go
    on, its --rdzv-id.

    The checkpoint is durable when write() returns. After an error there is none.
    """
    model = {key: value for key, value in model.items() if torch.is_tensor(value)}
    record, states = None, {}
    if optimizer is not None:
        kind = optimizer_type or _kind_of(optimizer)
        if kind not in _OPTIONS:
            raise CheckpointError(f"an optimizer {kind} is unknown: SGD, Adam or AdamW is expected")
        names = _names_of(optimizer, model, parameter_names)
        record, states = _record_of_optimizer(optimizer, kind, names)
    for tensors in (model, states, rng or {}):
        _check(tensors)
    kept, aliases = _without_aliases(model)
    if record is not None:
        for group in record["param_groups"]:
            unknown = [name for name in group["parameters"] if name not in model]
            if unknown:
                raise CheckpointError(f"the model has no {unknown[0]}, which the optimizer has")
    name = f"step-{step:012}.g{generation:04}"
    target = os.path.join(folder, name)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists")
    nonce = "python-" + secrets.token_hex(6)
    work = os.path.join(folder, f".tmp-{name}.{nonce}")
    os.makedirs(folder, exist_ok=True)
    os.mkdir(work)
    try:
        parts = _files_of("model", kept) + _files_of("optimizer", states)
        parts.append(("extra-00000.safetensors", rng or {}))
        files, tensors = [], []
        for file, content in parts:
            written, records = _write_file(work, file, content)
            files.append(written)
            tensors += records
        files.sort(key=lambda file: file["name"])
        tensors.sort(key=lambda r: (r["file"], r["offset"], r["bytes"], r["name"]))
        fields = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "generation": generation,
            "generation_nonce": nonce,
            "run_id": run_id,
            "epoch": epoch,
            "world_size": world_size,
            "sampler": sampler,
            "optimizer": record,
            "bucket_layout": [list(bucket) for bucket in bucket_layout],
            "aliases": aliases,
            "torch_version": torch.__version__,
            "saved_unix_seconds": int(time.time()),
            "state_xxh3_128": _state_hash(tensors),
            "files": files,
            "tensors": tensors,
        }
        if metric is not None:
            fields["metric"] = metric
        with open(os.path.join(work, MANIFEST), "xb") as stream:
            stream.write(_manifest_text(fields).encode())
            stream.flush()
            os.fsync(stream.fileno())
        _sync(work)
        os.rename(work, target)
    except BaseException:
        for entry in os.listdir(work):
            os.unlink(os.path.join(work, entry))
        os.rmdir(work)
        raise
    _sync(folder)
    return target


def save(folder, model, optimizer=None, **more):
    """write() for a module and its optimizer: their types and names tell the rest."""
    if optimizer is None:
        return write(folder, model.state_dict(), **more)
    names = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [i for i, p in enumerate(parameters) if id(p) not in names]
    if missing:
        raise CheckpointError(f"parameter {missing[0]} of the optimizer is not the model's")
    more.setdefault("rng", {"rng.cpu.0": torch.get_rng_state()})
    return write(
        folder,
        model.state_dict(),
        optimizer.state_dict(),
        optimizer_type=type(optimizer).__name__,
        parameter_names=[names[id(p)] for p in parameters],
        **more,
    )


# ---- Command line ----


def _export(options):
    saved = read(options.checkpoint, verify=not options.no_verify)
    torch.save(saved, options.out)
    print(f"{options.out}: step {saved['step']}, {len(saved['model'])} tensors of the model")


def _import(options):
    try:
        saved = torch.load(options.pt, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{options.pt}: {str(error).splitlines()[0]}") from error
    if not isinstance(saved, dict) or not isinstance(saved.get(options.model_key), dict):
        raise CheckpointError(f'{options.pt} has no dict "{options.model_key}": see --model-key')
    step = saved.get("step") if options.step is None else options.step
    if not isinstance(step, int):
        raise CheckpointError("--step is needed: the file has none")
    keep = ("sampler", "bucket_layout", "metric", "rng", "world_size")
    more = {key: saved[key] for key in keep if saved.get(key) is not None}
    if "parameter_names" in saved:
        more["parameter_names"] = saved["parameter_names"]
    print(
        write(
            options.folder,
            saved[options.model_key],
            saved.get(options.optimizer_key),
            step=step,
            epoch=saved.get("epoch") or 0 if options.epoch is None else options.epoch,
            optimizer_type=options.optimizer_type or saved.get("optimizer_type"),
            generation=options.generation,
            run_id=saved.get("run_id") or "" if options.run_id is None else options.run_id,
            **more,
        )
    )


def _whole(text):
    number = int(text)
    if number < 0:
        raise ValueError
    return number


_whole.__name__ = "whole number"


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description="Turns checkpoints of C++ trainers into .pt files of PyTorch, and back."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    out = verbs.add_parser("export", help="a checkpoint -> a .pt file")
    out.add_argument("checkpoint", help="its folder, or that of all: then the newest")
    out.add_argument("out", help="the .pt file: torch.load(weights_only=True) opens it")
    out.add_argument("--no-verify", action="store_true", help="do not compare the hashes")
    out.set_defaults(run=_export)
    into = verbs.add_parser("import", help="a .pt file -> a checkpoint")
    into.add_argument("pt", help='a dict with "model", "optimizer", "step", "epoch"')
    into.add_argument("folder", help="of all checkpoints of the job")
    into.add_argument("--step", type=_whole, help="optimizer steps done; default: the file's")
    into.add_argument("--epoch", type=_whole, help="default: the file's, or 0")
    into.add_argument("--generation", type=_whole, default=0, help="default: 0")
    into.add_argument("--run-id", help="of the job that goes on; default: the file's")
    into.add_argument("--optimizer-type", choices=sorted(_OPTIONS), help="default: the file tells")
    into.add_argument("--model-key", default="model", help="of the model's state_dict")
    into.add_argument("--optimizer-key", default="optimizer", help="of the optimizer's")
    into.set_defaults(run=_import)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except CheckpointError as error:
        print(f"ddp_checkpoint: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ddp_checkpoint: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
