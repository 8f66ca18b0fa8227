#!/usr/bin/env python3
"""Tests that docs/checkpoint-format.md is right: its reader reads real checkpoints.

    checkpoint_format_test.py                    # the committed ones
    checkpoint_format_test.py read FOLDER OUT    # another one: tensors as JSON, values as hex

Needs the standard library; with safetensors installed, that reads the files too.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
from xxh3 import xxh3_128  # noqa: E402  (found beside this file)

PAGE = os.path.join(ROOT, "docs", "checkpoint-format.md")
GOLDEN = os.path.join(ROOT, "testing", "oracle", "golden", "exchange")


def reader():
    """read_checkpoint() of the page."""
    with open(PAGE, encoding="utf-8") as stream:
        (program,) = re.findall(r"^```python\n(.*?)^```$", stream.read(), re.M | re.S)
    names = {}
    exec(compile(program, PAGE, "exec"), names)  # noqa: S102  (our own page)
    return lambda folder: names["read_checkpoint"](folder, xxh3_128)


def golden():
    for kind in sorted(os.listdir(GOLDEN)):
        for name in os.listdir(os.path.join(GOLDEN, kind)):
            yield kind, os.path.join(GOLDEN, kind, name)


class CheckpointFormatTest(unittest.TestCase):
    def test_the_reader_of_the_page_reads_every_tensor(self):
        read = reader()
        kinds = []
        for kind, folder in golden():
            manifest, parts = read(folder)
            kinds.append(kind)
            self.assertEqual(manifest["optimizer"]["type"], kind)
            count = sum(len(part) for part in parts.values()) - len(manifest["aliases"])
            self.assertEqual(count, len(manifest["tensors"]))
            dtype, shape, values = parts["model"]["fc1.weight"]
            self.assertEqual((dtype, shape, len(values)), ("F32", [8, 4], 128))
            self.assertEqual(parts["model"]["again.weight"], parts["model"]["fc2.weight"])
            self.assertIn("rng.cpu.0", parts["extra"])
            names = [n for g in manifest["optimizer"]["param_groups"] for n in g["parameters"]]
            for name in parts["optimizer"]:
                self.assertIn(re.fullmatch(r"state\.(.*)\.[a-z_]+", name)[1], names)
        self.assertEqual(kinds, ["Adam", "AdamW", "SGD"])

    def test_every_field_is_in_the_page(self):
        with open(PAGE, encoding="utf-8") as stream:
            page = stream.read()
        for _, folder in golden():
            with open(os.path.join(folder, "MANIFEST.json"), encoding="utf-8") as stream:
                manifest = json.load(stream)
            fields = set(manifest) | set(manifest["files"][0]) | set(manifest["tensors"][0])
            fields |= set(manifest["optimizer"]) | set(manifest["optimizer"]["param_groups"][0])
            for field in fields:
                self.assertIn(f"`{field}`", page)

    def test_a_changed_byte_is_found(self):
        read = reader()
        _, folder = next(golden())
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), "rb") as stream:
                content = stream.read()
            for at in range(0, len(content), len(content) // 20):
                with self.subTest(file=name, byte=at), tempfile.TemporaryDirectory() as other:
                    copy = shutil.copytree(folder, os.path.join(other, "copy"))
                    with open(os.path.join(copy, name), "wb") as stream:
                        changed = bytes([content[at] ^ 1])
                        stream.write(content[:at] + changed + content[at + 1 :])
                    with self.assertRaises(ValueError):
                        read(copy)

    def test_values_begin_at_a_page_and_the_header_says_the_same(self):
        for _, folder in golden():
            manifest, _ = reader()(folder)
            for file in manifest["files"]:
                with open(os.path.join(folder, file["name"]), "rb") as stream:
                    length = int.from_bytes(stream.read(8), "little")
                    header = json.loads(stream.read(length))
                self.assertEqual((8 + length) % 4096, 0)
                self.assertEqual(header.pop("__metadata__"), {"format": "pt"})
                stored = {t["name"]: t for t in manifest["tensors"] if t["file"] == file["name"]}
                self.assertEqual(set(header), set(stored))
                for name, entry in header.items():
                    begin, end = entry["data_offsets"]
                    tensor = stored[name]
                    self.assertEqual(8 + length + begin, tensor["offset"])
                    self.assertEqual(end - begin, tensor["bytes"])
                    self.assertEqual(entry["dtype"], tensor["dtype"])
                    self.assertEqual(entry["shape"], tensor["shape"])

    def test_safetensors_reads_the_same(self):
        try:
            from safetensors import deserialize
        except ImportError:
            self.skipTest("safetensors is not installed")
        for _, folder in golden():
            manifest, _ = reader()(folder)
            for file in manifest["files"]:
                with open(os.path.join(folder, file["name"]), "rb") as stream:
                    read = dict(deserialize(stream.read()))
                for tensor in manifest["tensors"]:
                    if tensor["file"] == file["name"]:
                        data = bytes(read[tensor["name"]]["data"])
                        self.assertEqual(xxh3_128(data), tensor["xxh3_128"])


def read_one(folder, out):
    _, parts = reader()(folder)
    shown = {
        part: {name: [dtype, shape, values.hex()] for name, (dtype, shape, values) in t.items()}
        for part, t in parts.items()
    }
    with open(out, "w", encoding="utf-8") as stream:
        json.dump(shown, stream)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "read":
        read_one(*sys.argv[2:])
    else:
        unittest.main()
