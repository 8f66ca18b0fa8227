"""Everything that this workspace depends on.

Called by our WORKSPACE and by every user's alike, and by extensions.bzl for MODULE.bazel.
"""

load(
    "@bazel_tools//tools/build_defs/repo:utils.bzl",
    "maybe",
)
load(
    "//third_party:bazel_stubs.bzl",
    "coverage_tools_stub",
    "installed_repository",
    "rules_cc_stub",
    "rules_shell_stub",
)
load("//third_party:system_library.bzl", "installed_packages", "system_library")
load("//third_party/cuda:repo.bzl", "cuda_repository")
load("//third_party/libtorch:repo.bzl", "libtorch_repository")
load("//third_party/nccl:repo.bzl", "nccl_repository")

_ABSEIL_MODULES = [
    "absl_base",
    "absl_flat_hash_map",
    "absl_hash",
    "absl_status",
    "absl_statusor",
    "absl_str_format",
    "absl_strings",
    "absl_time",
]

# name: (Debian package, header that proves it is there, {pkg-config module: link without it})
_SYSTEM_LIBRARIES = {
    "abseil": ("libabsl-dev", "absl/status/statusor.h", {
        module: "-l" + module
        for module in _ABSEIL_MODULES
    }),
    "benchmark": ("libbenchmark-dev", "benchmark/benchmark.h", {"benchmark": "-lbenchmark"}),
    "gflags": ("libgflags-dev", "gflags/gflags.h", {"gflags": "-lgflags"}),
    "glog": ("libgoogle-glog-dev", "glog/logging.h", {"libglog": "-lglog"}),
    "googletest": ("libgmock-dev libgtest-dev", "gmock/gmock.h", {
        "gmock": "-lgmock",
        "gtest": "-lgtest",
        "gtest_main": "-lgtest_main",
    }),
    "hiredis": ("libhiredis-dev", "hiredis/hiredis.h", {"hiredis": "-lhiredis"}),
    "lua": ("libluajit-5.1-dev", "luajit-2.1/lua.hpp", {"luajit": "-lluajit-5.1"}),
    "nlohmann_json": ("nlohmann-json3-dev", "nlohmann/json.hpp", {"nlohmann_json": ""}),
    "openssl": ("libssl-dev", "openssl/ssl.h", {"openssl": "-lssl -lcrypto"}),
    "prometheus_cpp": ("prometheus-cpp-dev", "prometheus/text_serializer.h", {
        "prometheus-cpp-core": "-lprometheus-cpp-core",
    }),
    "xxhash": ("libxxhash-dev", "xxhash.h", {"libxxhash": "-lxxhash"}),
}

# Bazel 4.2.3 reports no version; newer Bazel has this function and needs none of our stubs.
def _is_bazel_4():
    newer = getattr(native, "bazel_version", "") or hasattr(native, "package_relative_label")
    return not newer

def declare_libraries(declare):
    """Declares each library, by `declare(rule, name = ..., **attributes)`."""
    for name, (apt_package, header, modules) in _SYSTEM_LIBRARIES.items():
        declare(
            system_library,
            name = name,
            apt_package = apt_package,
            build_file = Label("//third_party/%s:system.BUILD.tpl" % name),
            header = header,
            pkg_config = modules,
        )
    declare(installed_packages, name = "installed_packages")
    declare(libtorch_repository, name = "libtorch")
    declare(nccl_repository, name = "nccl")
    declare(cuda_repository, name = "cuda")

def ddp_deps():
    """Declares every repository that is not declared yet: a user's earlier choice wins."""
    if _is_bazel_4():
        maybe(rules_cc_stub, name = "rules_cc")
        maybe(rules_shell_stub, name = "rules_shell")
        maybe(
            installed_repository,
            name = "rules_java",
            apt_package = "bazel-rules-java",
            path = "/usr/share/bazel/rules/java",
        )
        maybe(coverage_tools_stub, name = "remote_coverage_tools")
        maybe(
            installed_repository,
            name = "bazel_skylib",
            apt_package = "bazel-skylib",
            path = "/usr/share/bazel/tools/skylib",
        )
    declare_libraries(maybe)
