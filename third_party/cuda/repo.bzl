"""@cuda: the CUDA runtime's host headers: beside TORCH_PATH's torch, in the toolkit, or by hash.

Headers only. cuBLAS, cuSPARSE and cuSOLVER are not needed to compile: `opaque/` declares the few
handle types that torch's headers mention. Fetched only when something is built with --config=cuda.
"""

load("//third_party:versions.bzl", "TORCH_WHEELS", "chosen_torch_version")
load("//third_party:wheels.bzl", "fetch_wheels")

def _cuda_impl(ctx):
    torch = ctx.os.environ.get("TORCH_PATH", "")
    candidates = [ctx.path(str(ctx.path(torch).dirname) + "/nvidia/cu13/include")] if torch else []
    candidates.append(ctx.path("/usr/local/cuda/include"))
    include = None
    for candidate in candidates:
        if not include and candidate.get_child("cuda_runtime_api.h").exists:
            include = candidate
    if not include:
        runtime = {
            name: sha256
            for name, sha256 in TORCH_WHEELS[chosen_torch_version(ctx)].cuda.items()
            if name.startswith("nvidia-cuda-runtime")
        }
        fetch_wheels(ctx, runtime, "site-packages")
        include = ctx.path("site-packages/nvidia/cu13/include")
    ctx.symlink(include, "include")
    ctx.file("BUILD.bazel", """load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "headers",
    hdrs = glob(["include/*.h", "include/*.hpp", "include/crt/*"], allow_empty = True),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
""")

cuda_repository = repository_rule(
    implementation = _cuda_impl,
    environ = ["DDP_TORCH_VERSION", "TORCH_PATH"],
)
