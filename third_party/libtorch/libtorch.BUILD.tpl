load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

_HEADERS = glob(["include/**"])

_INCLUDES = [
    "include",
    "include/torch/csrc/api/include",
]

_DEFINES = ["_GLIBCXX_USE_CXX11_ABI=1"]

# Found again at run time under this very path: the libraries look for their neighbours relative to
# the folder that they lie in. Never -ltorch, which pulls in the CUDA half.
_LINK = [
    "-L%{lib}",
    "-Wl,-rpath,%{lib}",
    "-Wl,--disable-new-dtags",
]

cc_library(
    name = "torch",
    hdrs = _HEADERS,
    defines = _DEFINES,
    includes = _INCLUDES,
    linkopts = _LINK + [
        "-ltorch_cpu",
        "-lc10",
    ],
)

# The CUDA half needs 2.7 GB of NVIDIA's libraries at run time, which the user's own torch brings.
cc_library(
    name = "torch_cuda",
    hdrs = _HEADERS,
    defines = _DEFINES,
    includes = _INCLUDES,
    linkopts = _LINK + [
        "-Wl,--allow-shlib-undefined",
        "-Wl,--no-as-needed",
        "-ltorch_cuda",
        "-lc10_cuda",
        "-Wl,--as-needed",
        "-ltorch_cpu",
        "-lc10",
    ],
)
