"""@libtorch: the C++ half of the PyTorch wheel, fetched by hash or taken from TORCH_PATH.

DDP_TORCH_VERSION names the version to fetch, one of versions.bzl's; unset: TORCH_VERSION.

TORCH_PATH names an installed torch package (the folder that holds `lib` and `include`). It must
have the C++11 ABI. A version between the oldest and the newest of versions.bzl is supported; any
other is used with a warning, since the distributed classes that we build on change with releases.
"""

load("//third_party:versions.bzl", "TORCH_VERSION", "TORCH_WHEELS", "chosen_torch_version")
load("//third_party:wheels.bzl", "fetch_wheels")

def _release(version):
    """The release series of a version: (2, 11) of "2.11.0+cpu"."""
    major, minor = version.split("+")[0].split(".")[:2]
    return (int(major), int(minor))

def _installed_version(ctx, torch):
    """Returns the version as a wheel or as a LibTorch archive says it, "" where neither does."""
    wheel = torch.get_child("version.py")
    if wheel.exists:
        return ctx.read(wheel).split("__version__ = '")[1].split("'")[0]
    archive = torch.get_child("build-version")
    return ctx.read(archive).strip() if archive.exists else ""

def _check_installed(ctx, torch):
    version = _installed_version(ctx, torch)
    for part in ["lib/libtorch_cpu.so", "include/c10/core/TensorImpl.h", "version.py"]:
        exists = ctx.path(str(torch) + "/" + part).exists
        if not exists and not (part == "version.py" and version):
            fail(("TORCH_PATH=%s is not a torch package: %s is missing. Name the folder that " +
                  "`python3 -c 'import torch; print(torch.__path__[0])'` prints, or that of an " +
                  "unpacked LibTorch, or unset it to fetch torch %s.") %
                 (torch, part, TORCH_VERSION))
    supported = [_release(known) for known in TORCH_WHEELS]
    if not min(supported) <= _release(version) or not _release(version) <= max(supported):
        # buildifier: disable=print
        print("WARNING: TORCH_PATH=%s holds torch %s; this library is tested with torch %s to %s." %
              (torch, version, TORCH_WHEELS.keys()[0], TORCH_WHEELS.keys()[-1]))
    config = ctx.path(str(torch) + "/share/cmake/Torch/TorchConfig.cmake")
    if config.exists and "_GLIBCXX_USE_CXX11_ABI=0" in ctx.read(config):
        fail("TORCH_PATH=%s was built with the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0)." % torch)

def _libtorch_impl(ctx):
    installed = ctx.os.environ.get("TORCH_PATH", "")
    if installed:
        torch = ctx.path(installed)
        _check_installed(ctx, torch)
    else:
        version = chosen_torch_version(ctx)
        wheels = dict(TORCH_WHEELS[version].cuda)
        wheels["torch==" + version] = TORCH_WHEELS[version].sha256
        fetch_wheels(ctx, wheels, "site-packages")
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
    environ = ["DDP_TORCH_VERSION", "TORCH_PATH"],
)
