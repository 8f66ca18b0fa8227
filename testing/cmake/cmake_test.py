"""The install tree, used as docs/cmake.md says: by CMake, by pkg-config, from another folder."""

import functools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BAZEL = shlex.split(os.environ.get("BAZEL", "bazel"))
# What a machine with a C++ compiler has, and LibTorch.
FOREIGN = re.compile(
    r"(ld-linux-x86-64|lib(c|dl|m|pthread|rt|gcc_s|stdc\+\+|torch_cpu|c10))\.so(\.\d+)*"
)
KINDS = r"(|typeinfo for |typeinfo name for |vtable for |VTT for |guard variable for )"
EXPORTED = re.compile(KINDS + r"(|virtual thunk to |non-virtual thunk to )ddp::.*")
# The linker says where it has found each library.
VERBOSE_LINK = "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--verbose"
LEARNED = re.compile(r"epoch 4 loss 0\.000\d+ weight (2\.9|3\.0)\d+ bias (0\.9|1\.0)\d+\n")


def run(*command, folder=ROOT, **variables):
    """Returns what `command` prints. Neither LibTorch nor ddp is found by the environment."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_PATH"}
    environment["LC_ALL"] = "C"  # the texts of ld and ldd are read
    result = subprocess.run(command, cwd=folder, env=environment | variables, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if result.returncode != 0:
        raise AssertionError(f"{shlex.join(command)}: {result.stdout}\n{result.stderr}")
    return result.stdout


def bazel(*arguments):
    """Runs Bazel with the environment of the user, who may have chosen a LibTorch."""
    return subprocess.run([*BAZEL, *arguments], cwd=ROOT, check=True, text=True,
                          stdout=subprocess.PIPE).stdout.strip()


def read(path):
    with open(path, encoding="utf-8") as stream:
        return stream.read()


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)


@functools.cache
def scratch():
    folder = tempfile.TemporaryDirectory(prefix="ddp-cmake-")
    unittest.addModuleCleanup(folder.cleanup)
    return folder.name


@functools.cache
def tree():
    """The install tree, moved away from where Bazel has made it."""
    bazel("build", "--noshow_progress", "//:install_tree")
    copied = f"{scratch()}/moved/ddp"
    shutil.copytree(f"{bazel('info', 'bazel-bin')}/install_tree", copied, symlinks=True)
    return copied


@functools.cache
def torch():
    """LibTorch as it is served without CUDA: the wheel, with CUDA switched off in its CMake files.

    Those of the wheel fail on a machine without CUDA's compiler.
    """
    tree()  # fetches LibTorch
    fetched = f"{bazel('info', 'output_base')}/external/libtorch/include"
    wheel = os.path.dirname(os.path.realpath(fetched))
    folder = f"{scratch()}/site-packages/torch"
    os.makedirs(folder)
    for part in ("include", "lib"):
        os.symlink(f"{wheel}/{part}", f"{folder}/{part}")
    if os.path.isdir(f"{wheel}/../nvidia"):  # the libraries look for their neighbours there
        os.symlink(os.path.realpath(f"{wheel}/../nvidia"), f"{folder}/../nvidia")
    shutil.copytree(f"{wheel}/share/cmake", f"{folder}/share/cmake")
    for name in ("Caffe2/Caffe2Config.cmake", "Torch/TorchConfig.cmake"):
        path = f"{folder}/share/cmake/{name}"
        write(path, read(path).replace("if(1)", "if(0)").replace("if(1 AND", "if(0 AND"))
    return folder


def project(name, cmake_lists):
    folder = f"{scratch()}/{name}"
    write(f"{folder}/CMakeLists.txt", cmake_lists)
    return folder


@functools.cache
def six_lines():
    """The folder in which the six lines have built examples/minimal."""
    folder = project("six_lines", read(f"{ROOT}/testing/cmake/CMakeLists.txt"))
    shutil.copy(f"{ROOT}/examples/minimal/train.cc", folder)
    run("cmake", "-S", folder, "-B", f"{folder}/build", f"-DCMAKE_PREFIX_PATH={torch()};{tree()}",
        VERBOSE_LINK)
    write(f"{folder}/build/log", run("cmake", "--build", f"{folder}/build"))
    return f"{folder}/build"


def compiled():
    return f"{six_lines()}/CMakeFiles/train.dir/train.cc.o"


def needed(path):
    return set(re.findall(r"\(NEEDED\) .*\[(.+)\]", run("readelf", "-d", "-W", path)))


def loaded(path):
    """Library -> the file that the loader takes for it."""
    return dict(re.findall(r"^\s+(\S+) => (.+?)(?: \(0x\w+\))?$", run("ldd", path), re.M))


def symbols(path, *flags):
    """Symbol -> kind: T, W, ..."""
    lines = run("nm", "--defined-only", *flags, path).splitlines()
    return {fields[2]: fields[1] for fields in map(str.split, lines) if len(fields) == 3}


def demangled(names):
    return subprocess.run(["c++filt"], input="\n".join(names), check=True, text=True,
                          stdout=subprocess.PIPE).stdout.splitlines()


class InstallTreeTest(unittest.TestCase):
    maxDiff = None

    def assert_carried(self, path):
        """All that `path` needs is there: LibTorch's, the system's, or part of the tree."""
        for name, file in loaded(path).items():
            if os.path.exists(f"{tree()}/lib/ddp/{name}"):
                self.assertEqual(os.path.realpath(file), f"{tree()}/lib/ddp/{name}", path)
            self.assertNotEqual(file, "not found", name)

    def assert_linked(self, output):
        """So it is for the linker, which looks for the libraries of libraries."""
        found = dict(re.findall(r"found (\S+) at (\S+)$", output, re.MULTILINE))
        self.assertIn("libgflags.so.2.2", found)
        for name, file in found.items():
            if os.path.exists(f"{tree()}/lib/ddp/{name}"):
                self.assertEqual(os.path.realpath(file), f"{tree()}/lib/ddp/{name}")

    def assert_trains(self, program):
        out = run(f"{tree()}/bin/ddprun", "--nproc-per-node=2", program)
        self.assertRegex(out, LEARNED)

    def test_each_header_compiles_by_itself(self):
        bazel("build", "--noshow_progress", "--output_groups=headers_checked", "//:install_tree")
        checked = read(f"{bazel('info', 'bazel-bin')}/install_tree.headers_checked").split()
        include = f"{tree()}/include"
        installed = [os.path.relpath(os.path.join(folder, name), include)
                     for folder, _, names in os.walk(include) for name in names]
        self.assertEqual(checked, sorted(installed))
        listed = read(f"{ROOT}/tools/install/public_headers.txt").split()
        self.assertEqual(set(listed) - set(installed), set())

    def test_the_shared_library_exports_ddp_and_all_of_it(self):
        exported = symbols(f"{tree()}/lib/libddp.so", "-D")
        exported = {name.split("@")[0]: kind for name, kind in exported.items()}
        exported.pop("LIBDDP")
        self.assertEqual([x for x in demangled(exported) if not EXPORTED.fullmatch(x)], [])
        own = symbols(f"{tree()}/lib/libddp.a")
        own = [name for name, kind in own.items()
               if kind in "TDBRV" and re.match(r"_Z(T[VIS])?NK?3ddp", name)]
        self.assertGreater(len(own), 1000)
        self.assertEqual([x for x in own if x not in exported], [])

    def test_the_tree_needs_libtorch_and_libc_alone(self):
        carried = set(os.listdir(f"{tree()}/lib/ddp"))
        programs = ["bin/ddprun", "bin/redis-server", "lib/libddp.so"]
        for path in programs + [f"lib/ddp/{name}" for name in carried]:
            foreign = needed(f"{tree()}/{path}") - carried
            self.assertEqual([x for x in foreign if not FOREIGN.fullmatch(x)], [], path)
        self.assert_carried(f"{tree()}/bin/ddprun")
        self.assertNotRegex(str(carried), "torch|libc10|libc[.]so|libstdc")
        licences = read(f"{tree()}/licenses/list")
        self.assertIn("lib/ddp/libglog.so.1  libgoogle-glog0v6 ", licences)

    def test_the_tree_names_no_folder_of_the_build(self):
        for path, origin in (("bin/ddprun", "../lib/ddp"), ("lib/libddp.so", "ddp")):
            dynamic = run("readelf", "-d", f"{tree()}/{path}")
            paths = re.findall(r"R(?:UN)?PATH\) .*\[(.+)\]", dynamic)
            self.assertEqual(paths, ["$ORIGIN/" + origin])
        for folder in ("lib/cmake", "lib/pkgconfig"):
            names = run("grep", "-rlE", "/|@", f"{tree()}/{folder}").split()
            for name in names:
                self.assertNotRegex(read(name), r"@[A-Z_]+@|[\s\"]/(\w+/)+", name)

    def test_six_lines_of_cmake_build_and_train(self):
        self.assertIn(read(f"{ROOT}/testing/cmake/CMakeLists.txt"), read(f"{ROOT}/docs/cmake.md"))
        self.assert_linked(read(f"{six_lines()}/log"))
        self.assert_carried(f"{six_lines()}/train")
        self.assertIn("libddp.so", "".join(needed(f"{six_lines()}/train")))
        self.assert_trains(f"{six_lines()}/train")

    def test_the_static_library_and_a_libtorch_by_its_folder(self):
        folder = project("static", f"""
cmake_minimum_required(VERSION 3.25)
project(train CXX)
find_package(ddp 0.1 REQUIRED)
add_executable(train {compiled()})
set_target_properties(train PROPERTIES LINKER_LANGUAGE CXX)
target_link_libraries(train ddp::ddp_static)
""")
        run("cmake", "-S", folder, "-B", f"{folder}/build", f"-DCMAKE_PREFIX_PATH={tree()}",
            VERBOSE_LINK, TORCH_PATH=torch())
        self.assert_linked(run("cmake", "--build", f"{folder}/build"))
        self.assert_carried(f"{folder}/build/train")
        self.assertNotIn("libddp.so", "".join(needed(f"{folder}/build/train")))
        self.assert_trains(f"{folder}/build/train")

    def test_make_by_pkg_config(self):
        makefile = re.search(r"```make\n(.*?)```", read(f"{ROOT}/docs/cmake.md"), re.DOTALL)[1]
        folder = f"{scratch()}/make"
        write(f"{folder}/Makefile", makefile)
        write(f"{folder}/fields.cc",
              '#include "ddp/aggregate_fields.h"\n#include <c10/macros/Macros.h>\n')
        shutil.copy(compiled(), f"{folder}/train.o")
        output = run("make", f"TORCH_PATH={torch()}", "LDFLAGS=-Wl,--verbose", "fields.o", "train",
                     folder=folder, PKG_CONFIG_PATH=f"{tree()}/lib/pkgconfig")
        self.assert_linked(output)
        self.assert_carried(f"{folder}/train")

    def test_another_libtorch_is_refused(self):
        write(f"{scratch()}/old/include/torch/headeronly/version.h",
              '#define TORCH_VERSION \\\n  "2.10.0"\n')
        folder = project("refused", "cmake_minimum_required(VERSION 3.25)\nproject(a NONE)\n"
                                    "find_package(ddp REQUIRED)\n")
        with self.assertRaises(AssertionError) as raised:
            run("cmake", "-S", folder, "-B", f"{folder}/build", f"-DCMAKE_PREFIX_PATH={tree()}",
                f"-DTORCH_PATH={scratch()}/old")
        self.assertRegex(" ".join(str(raised.exception).split()),
                         r"this ddp was built with LibTorch \S+; \S+/old holds 2\.10\.0")


if __name__ == "__main__":
    unittest.main()
