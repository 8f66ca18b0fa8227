#!/usr/bin/env python3
"""Makes the install tree of install.bzl, and checks its headers. Run by Bazel's actions.

    make_tree.py tree SPECIFICATION TREE
    make_tree.py check_headers SPECIFICATION TREE STAMP

The libraries of the distribution that libddp and the programs need lie in lib/ddp/ of the tree,
where their rpath finds them. They are shared ones: Debian's static libraries cannot be part of a
shared library, since their thread-local variables are laid out for a program.
"""

import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "../bundle"))
import pack  # noqa: E402  (found beside this folder)

INCLUDE = re.compile(r'^#include [<"]([^">]+)[>"]', re.MULTILINE)
# Any machine with a C++ compiler has them.
OF_THE_COMPILER = re.compile(r"lib(gcc_s|stdc\+\+)\.so")
# Of all that libddp holds, what its users call. Instances of others' templates stay inside. The
# linker compares the names as c++filt prints them; "?" stands for a space.
EXPORTED = ("", "typeinfo?for?", "typeinfo?name?for?", "vtable?for?", "VTT?for?",
            "guard?variable?for?", "non-virtual?thunk?to?", "virtual?thunk?to?")
VERSION_SCRIPT = 'LIBDDP { global: extern "C++" { %s }; local: *; };\n' % " ".join(
    f"{kind}ddp::*;" for kind in EXPORTED
)



def run(*command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        sys.exit(f"make_tree: {' '.join(command[:4])} ...: {result.stdout[-4000:]}")
    return result.stdout


def read(path):
    with open(path, encoding="utf-8") as stream:
        return stream.read()


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)


# ---- Headers ----


def closure(listed, text_of):
    """The listed headers and all of ours that they include. `text_of`: our headers' texts."""
    names = list(listed)
    for name in names:  # grows
        names += [x for x in INCLUDE.findall(text_of[name]) if x in text_of and x not in names]
    return names


def install_headers(specification, tree):
    text_of = {name: read(path) for name, path in specification["headers"].items()}
    for name in closure(read(specification["public_headers"]).split(), text_of):
        write(f"{tree}/include/{name}", text_of[name])


def check_headers(specification, tree, stamp):
    """Compiles each installed header without a source file as a program of its own.

    The others have been: the source file X.cc includes X.h first, or tools/tidy.py complains.
    """
    root = f"{tree}/include"
    names = [os.path.relpath(os.path.join(folder, name), root)
             for folder, _, files in os.walk(root) for name in files]
    compiled = {re.sub(r".*?/bin/(.*)/_objs/[^/]+/([^/.]+)\..*", r"\1/\2.h", path)
                for path in specification["objects"]}
    flags = ["-std=c++20", "-Werror", "-fsyntax-only", "-I", root]
    flags += [word for path in specification["includes"] for word in ("-isystem", path)]

    def check(name):
        run(specification["compiler"], *flags, "-x", "c++", f"{root}/{name}")

    with concurrent.futures.ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(check, sorted(set(names) - compiled)))
    write(stamp, "".join(name + "\n" for name in sorted(names)))


# ---- Libraries ----


def make_static(specification, path):
    with tempfile.NamedTemporaryFile("w") as listed:
        listed.write("\n".join(specification["objects"]))
        listed.flush()
        run(specification["ar"], "qcsD", path, f"@{listed.name}")


def link_shared(specification, static, path):
    with tempfile.NamedTemporaryFile("w") as script:
        script.write(VERSION_SCRIPT)
        script.flush()
        run(
            specification["compiler"], "-shared", "-o", path,
            "-Wl,--whole-archive", static, "-Wl,--no-whole-archive",
            f"-Wl,-soname,{os.path.basename(path)}", f"-Wl,--version-script={script.name}",
            "-Wl,--as-needed", "-Wl,--no-undefined",
            *dict.fromkeys(specification["link_flags"]), "-lstdc++", "-lm",
        )


def needed(library):
    """The libraries of lib/ddp/ that the library itself names."""
    names = re.findall(r"\(NEEDED\) .*\[(.+)\]", run("readelf", "-d", "-W", library))
    return [x for x in names if os.path.exists(f"{os.path.dirname(library)}/ddp/{x}")]


# ---- The tree ----


def torch_version(specification):
    for folder in specification["includes"]:
        path = f"{folder}/torch/headeronly/version.h"
        if os.path.exists(path):
            return re.search(r'TORCH_VERSION \\\n\s+"([^"]+)"', read(path)).group(1)
    sys.exit("make_tree: LibTorch's version.h is not in " + " ".join(specification["includes"]))


def make_tree(specification, tree):
    version = run(specification["ddprun"], "--version").split()[-1]
    soname = "libddp.so." + ".".join(version.split(".")[:2])
    install_headers(specification, tree)
    os.makedirs(f"{tree}/lib")
    make_static(specification, f"{tree}/lib/libddp.a")
    bundle = pack.Bundle(tree, libraries="lib/ddp")
    with tempfile.TemporaryDirectory() as folder:
        link_shared(specification, f"{tree}/lib/libddp.a", f"{folder}/{soname}")
        programs = {f"lib/{soname}": f"{folder}/{soname}", "bin/ddprun": specification["ddprun"],
                    "bin/redis-server": pack.redis_server()}
        libraries = {}
        for name, path in programs.items():
            libraries.update(pack.libraries_of(path))
            bundle.add_program(name, path)
    torch = pack.find_torch(soname, libraries)
    for name, path in libraries.items():
        if not OF_THE_COMPILER.match(name) and not pack.is_of_torch(path, torch):
            bundle.add_library(name, path)
    bundle.add_licenses(torch)
    os.symlink(soname, f"{tree}/lib/libddp.so")
    torch_libraries = [flag[2:] for flag in dict.fromkeys(specification["link_flags"])
                       if flag.startswith(("-ltorch", "-lc10"))]
    known = {
        "CARRIED": ";".join(needed(f"{tree}/lib/{soname}")),
        "SONAME": soname,
        "TORCH_FLAGS": " ".join("-l" + name for name in torch_libraries),
        "TORCH_LIBRARIES": ";".join(torch_libraries),
        "TORCH_VERSION": torch_version(specification),
        "VERSION": version,
    }
    for path in specification["templates"]:
        text = re.sub(r"@([A-Z_]+)@", lambda match: known[match.group(1)], read(path))
        write(f"{tree}/lib/{path.split('/lib/', 1)[1]}", text)


def main(argv):
    specification = json.loads(read(argv[2]))
    try:
        {"tree": make_tree, "check_headers": check_headers}[argv[1]](specification, *argv[3:])
    except pack.PackError as error:
        sys.exit(f"make_tree: {error}")


if __name__ == "__main__":
    main(sys.argv)
