#!/usr/bin/env python3
"""Packs a trainer, ddprun and what they load into a folder that runs on another machine, and a tar.

    pack.py --output=FOLDER --tar=FILE --trainer=FILE --ddprun=FILE --run=TEMPLATE [--data=LIST]
            [--without-torch] [--arguments FLAG ...]

What a program loads is what ldd says. The C library stays behind: it belongs to the machine, as its
loader does. Every other library lies in FOLDER/lib, where the programs find it by their rpath.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

# Parts of the C library. A copy beside another machine's loader would crash.
_OF_THE_MACHINE = re.compile(
    r"(ld-linux|lib(anl|BrokenLocale|c|dl|m|mvec|nsl|nss_\w+|pthread|resolv|rt|util)\.so)"
)
# Compiled into the programs, so that no file of theirs is carried.
_HEADERS_ONLY = ("nlohmann-json3-dev",)
_DOCUMENTS = "/usr/share/doc"
_COMMON_LICENSES = "/usr/share/common-licenses"


class PackError(Exception):
    """The text says what is wrong, and what to do."""


# ---- What is needed -------------------------------------------------------------------------


def parse_ldd(text):
    """{name: path} of what ldd prints of a program; what it does not find is left out."""
    return dict(re.findall(r"^\s*(\S+) => (/\S+)", text, re.MULTILINE))


def closure(program, here, needed_by, comes_whole=lambda _name: False):
    """The libraries to carry, {name: path}: what a program needs, and what that needs in its turn.

    `here`: {name: path} of what the loader finds. needed_by(path): the names that a file names
    itself. Where comes_whole(name), a library comes from elsewhere with all that it needs.
    """
    found, left = {}, [program]
    while left:
        for name in needed_by(left.pop()):
            if name in found or _OF_THE_MACHINE.match(name):
                continue
            if name not in here:
                raise PackError(f"{program} needs {name}, which this machine does not have")
            found[name] = here[name]
            if not comes_whole(name):
                left.append(here[name])
    return found


def parse_torch_version(text):
    """The release that torch's version.py, or a stock LibTorch's build-version, names."""
    found = re.search(r"^(?:__version__ = ')?(\d+\.\d+\.\d+)", text, re.MULTILINE)
    if not found:
        raise PackError(f"no version of torch in {text[:80]!r}")
    return found.group(1)


def torch_version(torch):
    for name in ("version.py", "build-version"):
        path = os.path.join(torch, name)
        if os.path.exists(path):
            return parse_torch_version(_read(path))
    raise PackError(f"{torch} has neither version.py nor build-version: which torch is it?")


def find_torch(trainer, libraries):
    """The folder of the torch whose libtorch_cpu.so the trainer loads."""
    if "libtorch_cpu.so" not in libraries:
        raise PackError(f"{trainer} does not load libtorch_cpu.so: is it a trainer?")
    return os.path.dirname(os.path.dirname(os.path.realpath(libraries["libtorch_cpu.so"])))


def is_of_torch(path, torch):
    """Whether a library comes with torch: from its own folder, or NVIDIA's wheels beside it."""
    nvidia = os.path.join(os.path.dirname(torch), "nvidia")
    return os.path.realpath(path).startswith((torch + "/", nvidia + "/"))


def redis_server():
    path = shutil.which("redis-server")
    if not path:
        raise PackError("redis-server is not installed, and stands beside ddprun on other machines")
    return path


# ---- Whose it is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Owner:
    """Who made a file: a Debian package, or a wheel. `texts`: files or folders with its licence."""

    name: str
    version: str
    texts: tuple


def parse_owners(text):
    """{path: package} of what `dpkg-query --search` prints."""
    lines = [line for line in text.splitlines() if not line.startswith("diversion by ")]
    pairs = [line.rpartition(": ")[::2] for line in lines]
    return {path: packages.split(",")[0].split(":")[0] for packages, path in pairs}


def debian_owners(paths):
    """{path: package} of the files that Debian's packages have installed."""
    # A package may name its file by the folder that is a link today: /lib is /usr/lib.
    asked = {name: path for path in paths for name in (path, re.sub("^/usr/", "/", path))}
    answer = _output(["dpkg-query", "--search", *asked], codes=(0, 1))
    owners = parse_owners(answer)
    return {asked[name]: package for name, package in owners.items() if name in asked}


def debian_owner(package):
    version = _output(["dpkg-query", "--show", "--showformat=${Version}", package])
    return Owner(package, version, (os.path.join(_DOCUMENTS, package, "copyright"),))


def wheel_owners(torch):
    """{name: Owner} of torch and of the wheels beside it; a stock LibTorch has no such records."""
    site, owners = os.path.dirname(torch), {}
    for folder in sorted(os.listdir(site)):
        found = re.fullmatch(r"(torch|nvidia_\w+)-([^-]+)\.dist-info", folder)
        if found:
            info = os.path.join(site, folder)
            texts = [n for n in sorted(os.listdir(info)) if re.match("(?i)licen[cs]e|notice", n)]
            owners[found[1]] = Owner(*found.groups(), tuple(os.path.join(info, n) for n in texts))
    return owners


def wheel_of(path, torch, wheels):
    """The wheel whose RECORD lists the file."""
    site = os.path.dirname(torch)
    entry = f"\n{os.path.relpath(path, site)},"
    for name, owner in wheels.items():
        record = os.path.join(site, f"{name}-{owner.version}.dist-info", "RECORD")
        if os.path.exists(record) and entry in "\n" + _read(record):
            return owner
    return None


# ---- Packing --------------------------------------------------------------------------------


def _read(path):
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read()


def _write(path, text, mode=0o644):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(path, mode)


def _output(command, codes=(0,)):
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PackError(f"{command[0]} is not installed; tools/setup installs it") from None
    if answer.returncode not in codes:
        raise PackError(f"{shlex.join(command)}: {answer.stderr.strip()}")
    return answer.stdout


def needed_by(program):
    """The libraries that a program names itself, without those that they need in their turn."""
    return set(_output(["patchelf", "--print-needed", program]).split())


def libraries_of(program, without_torch=False):
    """Without LibTorch, NVIDIA's libraries come with the machine's own and may be missing here."""
    return closure(
        program,
        parse_ldd(_output(["ldd", program])),
        needed_by,
        lambda name: without_torch and name.startswith(("libtorch", "libc10")),
    )


def _copy(source, target, mode=0o644):
    """Of a folder: all of it."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        shutil.copytree(source, target, copy_function=_copy, dirs_exist_ok=True)
        return
    shutil.copyfile(source, target)  # the bytes of what a link names
    os.chmod(target, mode)


def _set_rpath(path, rpath):
    # As DT_RPATH, which also holds for what the libraries load in their turn.
    _output(["patchelf", "--force-rpath", "--set-rpath", rpath, path])


class Bundle:
    """A folder of programs, and of the libraries that they find in its folder `libraries`."""

    def __init__(self, folder, libraries="lib"):
        self._folder = folder
        self._libraries = libraries
        self._origins = {}  # by place in the folder: the path that it was copied from

    def place(self, *names):
        return os.path.join(self._folder, *names)

    def add_program(self, name, source):
        _copy(source, self.place(name), 0o755)
        way = os.path.relpath(self.place(self._libraries), os.path.dirname(self.place(name)))
        _set_rpath(self.place(name), f"$ORIGIN/{way}")
        self._origins[name] = os.path.realpath(source)

    def add_library(self, name, source):
        target = self.place(self._libraries, name)
        _copy(source, target)
        if _output(["patchelf", "--print-rpath", target]).strip():
            _set_rpath(target, "$ORIGIN")
        self._origins[f"{self._libraries}/{name}"] = os.path.realpath(source)

    def add_licenses(self, torch):
        """The text of every owner of a file, and licenses/list, which says whose each file is."""
        packages = debian_owners(self._origins.values())
        wheels = wheel_owners(torch)
        lines, owners = [], {debian_owner(name) for name in _HEADERS_ONLY}
        for name, path in sorted(self._origins.items()):
            if path in packages:
                owner = debian_owner(packages[path])
            else:
                owner = wheel_of(path, torch, wheels)
            if owner:
                owners.add(owner)
                lines.append(f"{name}  {owner.name} {owner.version}\n")
            elif name.startswith(f"{self._libraries}/"):
                lines.append(f"{name}  unknown: {os.path.basename(path)}\n")
                print(f"pack: no licence text is known for {path}", file=sys.stderr)
        for owner in owners:
            for text in owner.texts:
                _copy(text, self.place("licenses", owner.name, os.path.basename(text)))
                self._add_common_licenses(text)
        _write(self.place("licenses", "list"), "".join(lines))

    def _add_common_licenses(self, text):
        """Debian's texts name long licences by a path that other machines do not have."""
        if text.startswith(_DOCUMENTS):
            for name in re.findall(_COMMON_LICENSES + r"/([\w.-]*\w)", _read(text)):
                if os.path.exists(os.path.join(_COMMON_LICENSES, name)):
                    source = os.path.join(_COMMON_LICENSES, name)
                    _copy(source, self.place("licenses", "common-licenses", name))

    def add_data(self, trainer, listed):
        """The trainer's runfiles, where it looks for them: lines of "PATH<tab>FILE"."""
        for line in listed.splitlines():
            path, source = line.split("\t")
            runs = os.path.isfile(source) and os.access(source, os.X_OK)
            mode = 0o755 if runs else 0o644
            _copy(source, self.place(trainer + ".runfiles", path), mode)


def run_script(options, version):
    values = {
        "@ARGUMENTS@": shlex.join(options.arguments),
        "@TORCH@": version,
        "@TRAINER@": shlex.quote(os.path.basename(options.trainer)),
    }
    return re.sub("|".join(values), lambda found: values[found[0]], _read(options.run))


def pack(options):
    trainer = os.path.basename(options.trainer)
    programs = {"ddprun": options.ddprun, "redis-server": redis_server(), trainer: options.trainer}
    if "libtorch_cuda.so" in needed_by(options.trainer) and not options.without_torch:
        raise PackError(
            "a trainer built with --config=cuda needs 2.7 GB of NVIDIA's libraries, some of them"
            f" opened by name: build {os.path.basename(options.output)}_without_torch instead"
        )
    libraries = {}
    for path in programs.values():
        libraries.update(libraries_of(path, options.without_torch))
    torch = find_torch(options.trainer, libraries)
    bundle = Bundle(options.output)
    for name, path in programs.items():
        bundle.add_program(name, path)
    for name, path in libraries.items():
        if not (options.without_torch and is_of_torch(path, torch)):
            bundle.add_library(name, path)
    bundle.add_licenses(torch)
    if options.data:
        bundle.add_data(trainer, _read(options.data))
    _write(bundle.place("run"), run_script(options, torch_version(torch)), 0o755)
    parent, name = os.path.split(options.output)
    owner = ["--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--sort=name"]
    _output(["tar", *owner, "-cf", options.tar, "-C", parent, name])


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="pack")
    for name in ("output", "tar", "trainer", "ddprun", "run"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--data")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--arguments", nargs=argparse.REMAINDER, default=[])
    return parser.parse_args(argv)


def main(argv):
    try:
        pack(parse_arguments(argv))
    except (PackError, OSError) as error:
        sys.exit(f"pack: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
