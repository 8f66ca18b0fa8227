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

def ddp_cc_library(name, copts = [], **kwargs):
    cc_library(name = name, copts = _copts(copts), **kwargs)

def ddp_cc_binary(name, copts = [], **kwargs):
    cc_binary(name = name, copts = _copts(copts), **kwargs)

def ddp_cc_test(name, size, copts = [], deps = [], precompiled = "tensors", **kwargs):
    """A test.

    Args:
      name: of the test.
      size: as of cc_test, without a default, so that everybody chooses one.
      copts: as of cc_test.
      deps: as of cc_test.
      precompiled: "tensors", or "modules" for a test with modules or optimizers: the headers of
        //tools/precompiled that a test with LibTorch among its `deps` takes.
      **kwargs: passed to the cc_test.
    """
    if _TORCH in deps:
        pch = precompiled + "_pch"
        copts = copts + select({
            "@ddp//tools:with_precompiled_headers": ["-include", pch + ".h"],
            "//conditions:default": [],
        })
        deps = deps + select({
            "@ddp//tools:with_precompiled_headers": ["@ddp//tools/precompiled:" + pch],
            "//conditions:default": [],
        })
    cc_test(name = name, size = size, copts = _copts(copts), deps = deps, **kwargs)

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
    ddp_cc_test(
        name = name + "_test",
        size = "small",
        srcs = srcs,
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
