"""@nccl: NCCL's header and library: beside TORCH_PATH's torch, else by hash from a wheel.

The wheel is the one that the fetched torch requires.

Fetched only when something is built with --config=cuda.
"""

load("//third_party:versions.bzl", "TORCH_WHEELS", "chosen_torch_version")
load("//third_party:wheels.bzl", "fetch_wheels")

def _nccl_impl(ctx):
    torch = ctx.os.environ.get("TORCH_PATH", "")
    beside = ctx.path(str(ctx.path(torch).dirname) + "/nvidia/nccl") if torch else None
    if beside and ctx.path(str(beside) + "/include/nccl.h").exists:
        nccl = beside
    else:
        fetch_wheels(ctx, TORCH_WHEELS[chosen_torch_version(ctx)].nccl, "site-packages")
        nccl = ctx.path("site-packages/nvidia/nccl")
    version = [
        line.split(" ")[-1].strip("\"")
        for line in ctx.read(ctx.path(str(nccl) + "/include/nccl.h")).split("\n")
        if line.startswith("#define NCCL_VERSION_CODE")
    ]
    ctx.symlink(nccl.get_child("include"), "include")
    ctx.template("BUILD.bazel", ctx.attr.build_file, {
        "%{lib}": str(nccl.get_child("lib")),
        "%{version}": version[0] if version else "unknown",
    })

nccl_repository = repository_rule(
    implementation = _nccl_impl,
    attrs = {"build_file": attr.label(default = Label("//third_party/nccl:nccl.BUILD.tpl"))},
    environ = ["DDP_TORCH_VERSION", "TORCH_PATH"],
)
