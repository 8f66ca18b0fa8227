"""The libraries of deps.bzl for MODULE.bazel, ours and our users'."""

load("//third_party:deps.bzl", "declare_libraries")

def _declare(rule, **attributes):
    rule(**attributes)

def _ddp_deps_impl(_ctx):
    declare_libraries(_declare)

ddp_deps = module_extension(
    implementation = _ddp_deps_impl,
    doc = "LibTorch, NCCL, CUDA's headers and the libraries of the operating system.",
)
