"""What programs and libraries of a bundle ask of the machine, as readelf reads it."""

import os
import re
import subprocess


def _readelf(flag, path):
    command = ["readelf", "--wide", flag, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def files(bundle):
    """The paths of a bundle's programs and libraries."""
    names = ["ddprun", "redis-server", "train"]
    names += [f"lib/{name}" for name in sorted(os.listdir(os.path.join(bundle, "lib")))]
    return [os.path.join(bundle, name) for name in names]


def rpaths(path):
    """Where it looks for libraries, as "RPATH $ORIGIN"."""
    found = re.findall(r"\((R(?:UN)?PATH)\).*\[(.*)\]", _readelf("--dynamic", path))
    return [" ".join(pair) for pair in found]


def imports(path):
    """The functions that it takes from libraries."""
    return set(re.findall(r" UND (\w+)", _readelf("--dyn-syms", path)))


def glibc(path):
    """The oldest glibc that has all it asks for, as numbers: (2, 36)."""
    found = re.findall(r"Name: GLIBC_(\d+(?:\.\d+)*)", _readelf("--version-info", path))
    return max([tuple(int(part) for part in version.split(".")) for version in found] or [(0,)])
