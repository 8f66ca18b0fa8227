load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

# Found again at run time under this very path: the libraries look for their neighbours relative to
# the folder that they lie in. Never -ltorch, which pulls in the CUDA half.
_LINK = [
    "-L%{lib}",
    "-Wl,-rpath,%{lib}",
    "-Wl,--disable-new-dtags",
]

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    defines = ["_GLIBCXX_USE_CXX11_ABI=1"],
    includes = [
        "include",
        "include/torch/csrc/api/include",
    ],
)

cc_library(
    name = "torch",
    linkopts = _LINK + [
        "-ltorch_cpu",
        "-lc10",
    ],
    deps = [":headers"],
)

# The CUDA half needs 2.7 GB of NVIDIA's libraries at run time, which the user's own torch brings.
cc_library(
    name = "torch_cuda",
    linkopts = _LINK + [
        "-Wl,--allow-shlib-undefined",
        "-Wl,--no-as-needed",
        "-ltorch_cuda",
        "-lc10_cuda",
        "-Wl,--as-needed",
        "-ltorch_cpu",
        "-lc10",
    ],
    deps = [":headers"],
)
