#!/usr/bin/env python3
"""Tests ddp_checkpoint.py.

Needs torch. A Python without it runs the cases with the Python of the oracle, where there is one:
DDP_ORACLE_PYTHON, or the one that tools/test --oracle has installed.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.dirname(HERE))
try:
    import ddp_checkpoint
    import torch
except ImportError:
    torch = None


class WithPyTorchTest(unittest.TestCase):
    @unittest.skipIf(torch is not None, "the cases below run here")
    def test_with_the_python_of_the_oracle(self):
        import oracle

        given = os.environ.get("DDP_ORACLE_PYTHON")
        python = given or os.path.join(oracle.cache_folder(), "venv", "bin", "python")
        if not oracle.has_pytorch(python):
            self.skipTest(f"no PyTorch {oracle.PYTORCH} is installed; tools/test --oracle does")
        ran = subprocess.run(
            [python, os.path.abspath(__file__)], capture_output=True, text=True, check=False
        )
        self.assertEqual(ran.returncode, 0, ran.stderr)


@unittest.skipIf(torch is None, "no torch here")
class DdpCheckpointTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.join(folder.name, "checkpoints")
        self.pt = os.path.join(folder.name, "file.pt")
        torch.manual_seed(1)

    def trained(self, kind="AdamW", **options):
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        net.append(torch.nn.Linear(4, 2))
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1, **options)
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.rand(5, 3)).sum().backward()
            optimizer.step()
        return net, optimizer

    def command(self, *arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = ddp_checkpoint.main(list(arguments))
        return code, out.getvalue(), err.getvalue()

    def same(self, a, b):
        self.assertEqual(a.dtype, b.dtype)
        self.assertEqual(a.shape, b.shape)
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)]
        self.assertTrue(torch.equal(*bits))

    def test_a_model_and_its_optimizer_come_back(self):
        options = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}, "AdamW": {}}
        for step, kind in enumerate(options, 1):
            with self.subTest(kind=kind):
                net, optimizer = self.trained(kind, **options[kind])
                ddp_checkpoint.save(self.folder, net, optimizer, step=step, epoch=3, run_id="a")
                saved = ddp_checkpoint.read(self.folder)
                self.assertEqual((saved["step"], saved["epoch"], saved["run_id"]), (step, 3, "a"))
                self.assertEqual(saved["optimizer_type"], kind)
                self.assertEqual(set(saved["model"]), set(net.state_dict()))
                for name, tensor in net.state_dict().items():
                    self.same(saved["model"][name], tensor)
                again, other = self.trained(kind, **options[kind])
                again.load_state_dict(saved["model"])
                other.load_state_dict(saved["optimizer"])
                expected, found = optimizer.state_dict(), other.state_dict()
                for key, value in expected["param_groups"][0].items():
                    self.assertEqual(found["param_groups"][0][key], value, key)
                for number, state in expected["state"].items():
                    for key, value in state.items():
                        if value is not None:
                            self.same(found["state"][number][key], value)

    def test_every_dtype_and_shape(self):
        tensors = {}
        for name, dtype in ddp_checkpoint._DTYPES.items():
            raw = torch.arange(48, dtype=torch.uint8)
            if dtype == torch.bool:
                raw = raw % 2
            tensors[f"{name}.whole"] = raw.view(dtype)
            tensors[f"{name}.empty"] = torch.empty(0, 3, dtype=dtype)
            tensors[f"{name}.one"] = raw.view(dtype)[0].clone()
        tensors["turned"] = torch.arange(6.0).reshape(2, 3).t()
        tensors["conjugate"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
        tensors["größe"] = torch.ones(1)
        ddp_checkpoint.write(self.folder, tensors, step=1)
        found = ddp_checkpoint.read(self.folder)["model"]
        self.assertEqual(set(found), set(tensors))
        for name, tensor in tensors.items():
            self.same(found[name], tensor.resolve_conj().contiguous())

    def test_large_states_are_cut_into_files(self):
        before = ddp_checkpoint.FILE_BYTES
        self.addCleanup(setattr, ddp_checkpoint, "FILE_BYTES", before)
        ddp_checkpoint.FILE_BYTES = 64
        tensors = {str(i): torch.full((8,), float(i)) for i in range(5)}
        tensors["large"] = torch.rand(100)
        folder = ddp_checkpoint.write(self.folder, tensors, step=1)
        names = [f["name"] for f in ddp_checkpoint.read_manifest(folder)["files"]]
        self.assertIn("model-00004-of-00004.safetensors", names)
        for name, tensor in ddp_checkpoint.read(folder)["model"].items():
            self.same(tensor, tensors[name])

    def test_the_newest_is_of_the_highest_step_then_generation(self):
        for step, generation in ((9, 1), (10, 2), (10, 10)):
            model = {"a": torch.tensor(step * 100 + generation)}
            ddp_checkpoint.write(self.folder, model, step=step, generation=generation)
        os.mkdir(os.path.join(self.folder, ".tmp-step-000000000011.g0001.x"))
        self.assertEqual(ddp_checkpoint.read(self.folder)["model"]["a"], 1010)

    def test_a_damaged_tensor_and_a_damaged_manifest_are_named(self):
        folder = ddp_checkpoint.write(self.folder, {"a": torch.ones(3)}, step=1)
        for file, text in (
            ("model-00001-of-00001.safetensors", "tensor a is damaged"),
            ("MANIFEST.json", "the manifest does not match its own XXH3-128"),
        ):
            path = os.path.join(folder, file)
            with open(path, "r+b") as stream:
                stream.seek(-6, os.SEEK_END)
                byte = stream.read(1)
                stream.seek(-6, os.SEEK_END)
                stream.write(bytes([byte[0] ^ 1]))
            with self.assertRaisesRegex(ddp_checkpoint.CheckpointError, text):
                ddp_checkpoint.read(self.folder)
            code, _, err = self.command("export", folder, self.pt)
            self.assertEqual((code, err.count("\n")), (1, 1), err)
            self.assertIn(text, err)

    def test_export_and_import_on_the_command_line(self):
        net, optimizer = self.trained()
        ddp_checkpoint.save(self.folder, net, optimizer, step=7, run_id="a")
        code, out, err = self.command("export", self.folder, self.pt)
        self.assertEqual(code, 0, err)
        self.assertIn("step 7", out)
        saved = torch.load(self.pt, weights_only=True)
        self.same(saved["model"]["0.weight"], net[0].weight.detach())
        code, out, err = self.command("import", self.pt, self.folder + "2", "--run-id=b")
        self.assertEqual(code, 0, err)
        first = ddp_checkpoint.read_manifest(ddp_checkpoint.find(self.folder))
        again = ddp_checkpoint.read_manifest(out.strip())
        self.assertEqual(again["run_id"], "b")
        for key in ("state_xxh3_128", "optimizer", "aliases", "step", "files"):
            self.assertEqual(again[key], first[key])

    def test_a_file_of_a_python_program(self):
        net, optimizer = self.trained("SGD", momentum=0.9)
        content = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(content, self.pt)
        code, _, err = self.command("import", self.pt, self.folder)
        self.assertEqual(code, 1)
        self.assertEqual(err, f'ddp_checkpoint: {self.pt} has no dict "model": see --model-key\n')
        code, _, err = self.command("import", self.pt, self.folder, "--model-key=net")
        self.assertIn("--step is needed", err)
        code, out, err = self.command("import", self.pt, self.folder, "--model-key=net", "--step=2")
        self.assertEqual(code, 0, err)
        optimizer = ddp_checkpoint.read_manifest(out.strip())["optimizer"]
        self.assertEqual(optimizer["type"], "SGD")
        names = [name for name, _ in net.named_parameters()]
        self.assertEqual(optimizer["param_groups"][0]["parameters"], names)

    def test_what_ours_does_not_have_is_refused(self):
        def refused(text, *more, **options):
            with self.assertRaisesRegex(ddp_checkpoint.CheckpointError, text):
                ddp_checkpoint.write(self.folder, *more, step=1, **options)
            self.assertFalse(os.path.exists(self.folder) and os.listdir(self.folder))

        net, optimizer = self.trained("SGD", maximize=True)
        refused("maximize=True", net.state_dict(), optimizer.state_dict())
        net, optimizer = self.trained("Adagrad")
        refused("name the optimizer", net.state_dict(), optimizer.state_dict())
        states = net.state_dict(), optimizer.state_dict()
        refused("Adagrad is unknown", *states, optimizer_type="Adagrad")
        net, optimizer = self.trained("Adam")
        names = [name for name, _ in net.named_parameters()]
        refused(
            "another shape", net.state_dict(), optimizer.state_dict(), parameter_names=names[::-1]
        )
        frozen = {**net.state_dict(), "frozen": torch.ones(2)}
        refused("give parameter_names", frozen, optimizer.state_dict())
        refused("is not saved", {"a": torch.ones(2).to_sparse()})
        refused("is not saved", {"a": torch.ones(2, dtype=torch.complex128)})

    def test_an_existing_checkpoint_is_not_replaced(self):
        folder = ddp_checkpoint.write(self.folder, {"a": torch.ones(3)}, step=1)
        with self.assertRaisesRegex(ddp_checkpoint.CheckpointError, "exists"):
            ddp_checkpoint.write(self.folder, {"a": torch.zeros(3)}, step=1)
        self.same(ddp_checkpoint.read(folder)["model"]["a"], torch.ones(3))
        self.assertEqual(len(os.listdir(self.folder)), 1)

    def test_mistakes_are_one_line(self):
        for arguments in (
            ("export", self.folder, self.pt),
            ("import", self.pt, self.folder),
        ):
            code, _, err = self.command(*arguments)
            self.assertEqual((code, err.count("\n")), (1, 1), err)
        os.mkdir(self.folder)
        self.assertIn("holds no checkpoint", self.command("export", self.folder, self.pt)[2])
        with open(self.pt, "w", encoding="utf-8") as stream:
            json.dump({}, stream)
        code, _, err = self.command("import", self.pt, self.folder)
        self.assertEqual((code, err.count("\n")), (1, 1), err)


if __name__ == "__main__":
    unittest.main()
