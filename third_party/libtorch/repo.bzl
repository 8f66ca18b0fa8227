"""@libtorch: the C++ half of the PyTorch wheel, fetched by hash or taken from TORCH_PATH.

TORCH_PATH names an installed torch package (the folder that holds `lib` and `include`). It must be
of the very version in versions.bzl and have the C++11 ABI: the distributed classes that we build on
change in every release.
"""

load("//third_party:versions.bzl", "TORCH_VERSION", "TORCH_WHEELS")
load("//third_party:wheels.bzl", "fetch_wheels")

def _check_installed(ctx, torch):
    for part in ["lib/libtorch_cpu.so", "include/c10/core/TensorImpl.h", "version.py"]:
        if not ctx.path(str(torch) + "/" + part).exists:
            fail(("TORCH_PATH=%s is not a torch package: %s is missing. Name the folder that " +
                  "`python3 -c 'import torch; print(torch.__path__[0])'` prints, or unset it " +
                  "to fetch torch %s.") %
                 (torch, part, TORCH_VERSION))
    version = ctx.read(torch.get_child("version.py")).split("__version__ = '")[1].split("'")[0]
    if version.split("+")[0] != TORCH_VERSION:
        fail(("TORCH_PATH=%s holds torch %s; this library needs %s. " +
              "Unset TORCH_PATH to fetch that.") %
             (torch, version, TORCH_VERSION))
    config = ctx.path(str(torch) + "/share/cmake/Torch/TorchConfig.cmake")
    if config.exists and "_GLIBCXX_USE_CXX11_ABI=0" in ctx.read(config):
        fail("TORCH_PATH=%s was built with the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0)." % torch)

def _libtorch_impl(ctx):
    installed = ctx.os.environ.get("TORCH_PATH", "")
    if installed:
        torch = ctx.path(installed)
        _check_installed(ctx, torch)
    else:
        fetch_wheels(ctx, TORCH_WHEELS, "site-packages")
        torch = ctx.path("site-packages/torch")

        # Packages inside the wheel would end our globs.
        ctx.execute(
            ["find", "site-packages", "(", "-name", "BUILD", "-o", "-name", "BUILD.bazel"] +
            ["-o", "-name", "WORKSPACE", ")", "-delete"],
        )
    ctx.symlink(torch.get_child("include"), "include")
    ctx.template("BUILD.bazel", ctx.attr.build_file, {"%{lib}": str(torch.get_child("lib"))})

libtorch_repository = repository_rule(
    implementation = _libtorch_impl,
    attrs = {
        "build_file": attr.label(default = Label("//third_party/libtorch:libtorch.BUILD.tpl")),
    },
    environ = ["TORCH_PATH"],
)
