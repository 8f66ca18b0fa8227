"""The macros that our BUILD files and our users' are written with."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")

# The language is also in .bazelrc, which users of this workspace do not inherit.
COPTS = ["-std=c++20"]

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",  # designated initializers leave out what has a default
    "-Wno-sign-compare",
    "-Wno-unused-parameter",
]

_TORCH = "@libtorch//:torch"

def _copts(copts):
    return COPTS + _WARNINGS + select({
        "@ddp//tools:with_werror": ["-Werror"],
        "//conditions:default": [],
    }) + copts

def if_cuda(with_cuda, without = []):
    """Chooses by --config=cuda."""
    return select({
        "@ddp//:with_cuda": with_cuda,
        "//conditions:default": without,
    })

def _if_precompiled(added):
    return select({
        "@ddp//tools:with_precompiled_headers": added,
        "//conditions:default": [],
    })

def _precompiled(pch, copts, deps):
    """Returns `copts` and `deps` of a target that takes headers of //tools/precompiled, or None."""
    if not pch:
        return {"copts": _copts(copts), "deps": deps}
    return {
        "copts": _copts(copts + _if_precompiled(["-include", pch + "_pch.h"])),
        "deps": deps + _if_precompiled(["@ddp//tools/precompiled:%s_pch" % pch]),
    }

def ddp_cc_library(name, copts = [], deps = [], precompiled = None, **kwargs):
    """A library. `precompiled`, for one that only tests use: as of ddp_cc_test."""
    cc_library(name = name, **dict(kwargs, **_precompiled(precompiled, copts, deps)))

def ddp_cc_binary(name, copts = [], deps = [], precompiled = None, **kwargs):
    """A program. `precompiled`, for one that only tests use: as of ddp_cc_test."""
    cc_binary(name = name, **dict(kwargs, **_precompiled(precompiled, copts, deps)))

def ddp_cc_test(name, size, copts = [], deps = [], precompiled = None, **kwargs):
    """A test.

    Args:
      name: of the test.
      size: as of cc_test, without a default, so that everybody chooses one.
      copts: as of cc_test.
      deps: as of cc_test.
      precompiled: the headers of //tools/precompiled that the test takes: "modules" for a test with
        modules or optimizers. By default "tensors" for a test with LibTorch among its `deps`, and
        "torch_free" for any other.
      **kwargs: passed to the cc_test.
    """
    pch = precompiled or ("tensors" if _TORCH in deps else "torch_free")
    cc_test(name = name, size = size, **dict(kwargs, **_precompiled(pch, copts, deps)))

def ddp_cc_fuzz(name, srcs, deps = [], **kwargs):
    """A fuzz target, and `NAME_test`, which runs its seeds with any compiler.

    NAME itself is a libFuzzer program. Only --config=fuzz can build it, and no pattern such as
    `//...` reaches it: `tools/test --fuzz` finds it by its tag. See testing/fuzz_target.h.

    Args:
      name: `<stem>_fuzz`.
      srcs: `<stem>_fuzz.cc`, beside the code that it fuzzes.
      deps: as of cc_binary, besides //testing:fuzz_target.
      **kwargs: passed to both programs.
    """
    ddp_cc_binary(
        name = name,
        testonly = True,
        srcs = srcs,
        linkopts = select(
            {"@ddp//tools:with_fuzzer": ["-fsanitize=fuzzer"]},
            no_match_error = "a fuzz target is built with --config=fuzz",
        ),
        tags = [
            "fuzz",
            "manual",
        ],
        deps = deps + [
            "@ddp//testing:fuzz_engine",
            "@ddp//testing:fuzz_target",
        ],
        **kwargs
    )
    cc_test(
        name = name + "_test",
        size = "small",
        srcs = srcs,
        copts = _copts([]),
        tags = ["cpu"],
        deps = deps + [
            "@ddp//testing:fuzz_replay",
            "@ddp//testing:fuzz_target",
        ],
        **kwargs
    )

def ddp_embed(name, srcs, **kwargs):
    """Text files as constants in "<package>/<name>.h".

    `join.lua` is `ddp::embedded::<name>::kJoin`.

    Args:
      name: of the cc_library to depend on, of the header and of the namespace.
      srcs: the files; stems in snake_case.
      **kwargs: passed to the cc_library.
    """
    native.genrule(
        name = name + "_header",
        srcs = srcs,
        outs = [name + ".h"],
        cmd = "$(location @ddp//tools:embed) %s $@ $(SRCS)" % name,
        tools = ["@ddp//tools:embed"],
    )
    cc_library(name = name, hdrs = [name + ".h"], **kwargs)

_COMMON_ATTRIBUTES = ["tags", "target_compatible_with", "testonly", "visibility"]

def ddp_trainer(name, srcs, deps = [], data = [], args = [], **kwargs):
    """A training program, and `NAME.launch`, which runs it under ddprun.

        bazel run //my:train.launch -- --nproc-per-node=2 -- --lr=0.1

    What stands before the second `--` goes to ddprun, what follows to the program.

    Args:
      name: of the program.
      srcs: as of cc_binary.
      deps: as of cc_binary.
      data: files that the program finds in its runfiles.
      args: given to the program before the user's own.
      **kwargs: passed to the cc_binary; what both have, to `NAME.launch` too.
    """
    ddp_cc_binary(name = name, srcs = srcs, deps = deps, data = data, **kwargs)
    common = {key: kwargs[key] for key in _COMMON_ATTRIBUTES if key in kwargs}
    native.sh_binary(
        name = name + ".launch",
        srcs = ["@ddp//tools:launch.sh"],
        args = [
            "$(rootpath @ddp//launcher:ddprun)",
            "$(rootpath :%s)" % name,
            str(len(args)),
        ] + args,
        data = [
            "@ddp//launcher:ddprun",
            ":" + name,
        ] + data,
        **common
    )
