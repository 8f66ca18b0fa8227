"""Bare Debian: file systems of Debian's packages, and hosts that see nothing but one of them.

    root = bare_debian.file_system("trixie")
    bare_debian.move_in(network["a"], root, {"/opt": bundles})
    network["a"].start(["/opt/train.bundle/run"], output=path, cwd="/")

debootstrap makes a file system once, of the mirror that this machine's apt reads; it stays in the
user's cache, ~/.cache/ddp/debian. Nobody writes to it afterwards.
"""

import fcntl
import functools
import os
import shlex
import shutil
import subprocess
import unittest

import hosts

# In a file system in memory, where the thousand fsync() of dpkg cost nothing.
_MAKE = """
mount -t tmpfs -o mode=755 tmpfs /mnt
debootstrap --variant=minbase "$1" /mnt "$2" >"$3.log" 2>&1 || exit 3
# What debootstrap takes from this machine, and what it has downloaded.
rm -f /mnt/etc/resolv.conf /mnt/etc/hostname
rm -rf /mnt/var/cache/apt/* /mnt/var/lib/apt/lists/*
cp -a /mnt/. "$3"
"""
# Run on a host, whose process table and mounts are its own.
_MOVE_IN = """
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
for folder in tmp dev/shm; do mount -t tmpfs -o mode=1777 tmpfs "$folder"; done
for device in null zero full random urandom; do mount --bind /dev/$device dev/$device; done
[ "$2" = writable ] || mount -o remount,bind,ro .
shift 2
while [ $# -gt 0 ]; do mount --bind "$1" ".$2"; shift 2; done
/usr/sbin/pivot_root . mnt
umount -l /mnt
"""
_UNREACHABLE = (
    "Failed getting release file",
    "Couldn't download",
    "Couldn't find these debs",
    # A container without the right to make device nodes or mounts.
    "noexec or nodev",
    "permission denied",
    "Operation not permitted",
)
# Of one debootstrap. A test has 15 minutes.
_PATIENCE_S = 300


class Unreachable(Exception):
    """Debian's packages cannot be had here; the text says why."""


def _apt_lines(command):
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def mirror():
    """Where apt gets this machine's own release from."""
    with open("/etc/os-release", encoding="utf-8") as stream:
        release = dict(shlex.split(line)[0].split("=", 1) for line in stream if "=" in line)
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"]
    for line in _apt_lines([*command, "Created-By: Packages", "Component: main"]):
        codename, uri = line.split(" ", 1)
        # debootstrap reads no other kind, mirror+file: for example.
        if codename == release.get("VERSION_CODENAME") and uri.startswith(("http", "file:")):
            return uri
    raise Unreachable("apt has no source of this machine's own release that debootstrap can read")


def _environment():
    """With apt's proxies, which debootstrap does not read itself."""
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    for scheme in ("http", "https"):
        for line in _apt_lines(["apt-config", "shell", "PROXY", f"Acquire::{scheme}::Proxy"]):
            environment[f"{scheme}_proxy"] = shlex.split(line)[0].removeprefix("PROXY=")
    return environment


def _cache():
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(home, "ddp", "debian")
    os.makedirs(folder, exist_ok=True)
    return folder


def _make(suite, root):
    partial = f"{root}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.mkdir(partial)
    command = ["unshare", "--mount", "sh", "-euc", _MAKE, "make", suite, mirror(), partial]
    try:
        answer = subprocess.run(
            command,
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"debootstrap of {suite} took longer than {_PATIENCE_S} s") from None
    if answer.returncode != 0:
        said = answer.stderr + _read(f"{partial}.log")
        reason = f"debootstrap of {suite}: {(said.strip() or 'no word').splitlines()[-1]}"
        if any(text in said for text in _UNREACHABLE):
            raise Unreachable(reason)
        raise hosts.HostsError(reason)
    os.rename(partial, root)


def _read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except FileNotFoundError:
        return ""


def file_system(suite):
    """The folder of a bare Debian, e.g. "bookworm". Errors: Unreachable."""
    root = os.path.join(_cache(), suite)
    with open(f"{root}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(root):
            _make(suite, root)
    return root


@functools.cache
def why_not():
    """Why this process cannot make such file systems and hosts, in one line; "" where it can.

    Makes those that are not there yet. Errors: hosts.HostsError.
    """
    if hosts.why_not():
        return hosts.why_not()
    if shutil.which("debootstrap", path=_environment()["PATH"]) is None:
        return "bare file systems are made with debootstrap, which is not installed"
    try:
        for suite in ("bookworm", "trixie"):
            file_system(suite)
    except Unreachable as error:
        return str(error)
    return ""


def skip_where_missing():
    """For the setup of a test that needs them."""
    reason = why_not()
    if reason:
        raise unittest.SkipTest(reason)


def move_in(host, root, folders, writable=False):
    """Makes `root` all that a host's programs see, and `folders`, {place in it: folder here}."""
    binds = [word for place, folder in folders.items() for word in (folder, place)]
    mode = "writable" if writable else "read-only"
    host.run(["sh", "-euc", _MOVE_IN, "move_in", root, mode, *binds])
