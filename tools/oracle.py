"""PyTorch for tools/test --oracle: a Python that has it, and its side of the comparison."""

import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTORCH = "2.15.0"
# The oracle needs both; the wheel of torch from PyPI is what the build links as well.
PACKAGES = [f"torch=={PYTORCH}", "numpy"]
TESTS = [
    f"//testing/oracle:{name}_test"
    for name in ("checkpoint_exchange", "golden", "graph_cut", "optimizer", "schedule")
]
GENERATE = os.path.join(ROOT, "testing", "oracle", "generate.py")


class OracleError(Exception):
    """Why PyTorch's side could not be run."""


def cache_folder():
    """Outside the checkout: half a gigabyte that the next run uses again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "ddp-oracle")


def has_pytorch(python):
    program = f"import numpy, torch; assert torch.__version__.split('+')[0] == '{PYTORCH}'"
    try:
        tried = subprocess.run([python, "-c", program], capture_output=True, check=False)
    except OSError:
        return False
    return tried.returncode == 0


def find_python():
    """DDP_ORACLE_PYTHON, or the venv in the cache folder, which is made where it is missing."""
    given = os.environ.get("DDP_ORACLE_PYTHON")
    if given:
        if not has_pytorch(given):
            raise OracleError(f"DDP_ORACLE_PYTHON={given} has no torch {PYTORCH} with numpy")
        return given
    venv = os.path.join(cache_folder(), "venv")
    python = os.path.join(venv, "bin", "python")
    if not has_pytorch(python):
        print(f"installing {' and '.join(PACKAGES)} in {venv}", flush=True)
        _call([sys.executable, "-m", "venv", venv], "python3-venv has to be installed")
        _call([python, "-m", "pip", "install", "--quiet", *PACKAGES], "pip could not install them")
    return python


def _call(command, hint):
    if subprocess.run(command, check=False).returncode != 0:
        raise OracleError(f"{' '.join(command)} failed; its message stands above. {hint}?")


def test_flags():
    """Runs PyTorch's side; returns flags that name its values and its Python to the tests."""
    folder, python = os.path.join(cache_folder(), "fresh"), find_python()
    _call([python, GENERATE, "--out", folder], "an error in the scenarios")
    return [f"--test_env=DDP_ORACLE_DIRECTORY={folder}", f"--test_env=DDP_ORACLE_PYTHON={python}"]
