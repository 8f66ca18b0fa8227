"""The macros that our BUILD files and our users' are written with."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")
load("@rules_shell//shell:sh_binary.bzl", "sh_binary")
load("//tools/bundle:bundle.bzl", "ddp_bundle")

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

def _own(label):
    """Returns the label of a target of this repository, by whatever name the user's calls it."""
    return str(Label(label))

def _copts(copts):
    return COPTS + _WARNINGS + select({
        _own("//tools:with_werror"): ["-Werror"],
        "//conditions:default": [],
    }) + copts

def if_cuda(with_cuda, without = []):
    """Chooses by --config=cuda."""
    return select({
        _own("//:with_cuda"): with_cuda,
        "//conditions:default": without,
    })

def _if_precompiled(added):
    return select({
        _own("//tools:fastbuild_with_clang"): [],
        _own("//tools:fastbuild"): added,
        "//conditions:default": [],
    })

def _precompiled(pch, copts, deps):
    """Returns `copts` and `deps` of a target that takes headers of //tools/precompiled, or None."""
    if not pch:
        return {"copts": _copts(copts), "deps": deps}
    return {
        "copts": _copts(copts + _if_precompiled(["-include", pch + "_pch.h"])),
        "deps": deps + _if_precompiled([_own("//tools/precompiled:%s_pch" % pch)]),
    }

# What a test needs besides a CPU, by what it depends on: its tags.
_RANKS = ["multiproc", "redis"]  # its processes wait most of the time: one CPU
_TAGS_OF_DEPS = {
    "//launcher/end_to_end:ddprun_driver": _RANKS,
    "//store/redis_server:private_redis_server": ["redis"],
    "//testing/ranks:rank_test": _RANKS,
    "//testing/redis:redis_fixture": ["redis"],
}

# Tests whose ranks compute with LibTorch can have them on simulated devices, by tools/test
# --device=sim, unless they have a device of their own.
_DEVICE = "//testing/accelerator"
_RANK_DEVICE = "//testing/accelerator:rank_device"

_MAIN = "@googletest//:gtest_main"
_NO_MAIN = "@googletest//:gtest"  # for a test with a main() of its own
_RANK_MAINS = ["//testing/ranks:rank_test", "//testing/backend:thread_ranks"]  # have main()

def _absolute(label):
    """Returns the label of a dependency in the form that tables name it in."""
    if label.startswith(":"):
        return "//" + native.package_name() + label
    if label.startswith("//") and ":" not in label:
        return label + ":" + label.split("/")[-1]
    return label

def _tags(tags, deps):
    known = {tag: None for tag in tags}
    if "gpu" not in tags:
        known["cpu"] = None
        for dep in deps:
            known.update({tag: None for tag in _TAGS_OF_DEPS.get(_absolute(dep), [])})
    if _has_rank_device(deps):
        known["device"] = None
    return sorted(known)

def _has_ranks(deps):
    return any([_absolute(dep) in _RANK_MAINS for dep in deps])

def _with_main(deps):
    """Adds GoogleTest, and its main() unless a dependency has one or the test names GoogleTest."""
    if _MAIN in deps or _NO_MAIN in deps:
        return deps
    return deps + [_NO_MAIN if _has_ranks(deps) else _MAIN]

def _has_rank_device(deps):
    return _has_ranks(deps) and _TORCH in deps and _DEVICE not in deps

def _own_file(name, suffix):
    return native.glob([name + suffix], allow_empty = True)

def _program_srcs(name, srcs):
    srcs = srcs or _own_file(name, ".cc")
    if not srcs:
        fail("//%s:%s: there is no %s.cc; name the srcs" % (native.package_name(), name, name))
    return srcs

def ddp_cc_library(name, copts = [], deps = [], precompiled = None, **kwargs):
    """A library.

    Args:
      name: of the library. Without srcs and hdrs, it is made of NAME.cc and NAME.h, as far as they
        exist.
      copts: as of cc_library.
      deps: as of cc_library.
      precompiled: as of ddp_cc_test, for a library that only tests use. By default "library" for
        one with LibTorch in its `deps`, unless macros of its own change what LibTorch's headers
        say.
      **kwargs: passed to the cc_library.
    """
    if type(deps) == "list" and _TORCH in deps and "local_defines" not in kwargs:
        precompiled = precompiled or "library"
    files = kwargs
    if "srcs" not in kwargs and "hdrs" not in kwargs:
        files = dict(kwargs, srcs = _own_file(name, ".cc"), hdrs = _own_file(name, ".h"))
    cc_library(name = name, **dict(files, **_precompiled(precompiled, copts, deps)))

def ddp_cc_binary(name, srcs = None, copts = [], deps = [], precompiled = None, **kwargs):
    """A program: of NAME.cc, unless srcs are given.

    Args:
      name: of the program.
      srcs: as of cc_binary.
      copts: as of cc_binary.
      deps: as of cc_binary.
      precompiled: as of ddp_cc_test, for a program that only tests use.
      **kwargs: passed to the cc_binary.
    """
    srcs = _program_srcs(name, srcs)
    cc_binary(name = name, srcs = srcs, **dict(kwargs, **_precompiled(precompiled, copts, deps)))

# A source, for ThreadSanitizer looks for them in the program only, not in its libraries.
_SUPPRESSIONS = select({
    _own("//tools:with_tsan"): [_own("//testing:tsan_suppressions")],
    "//conditions:default": [],
})

def ddp_cc_test(
        name,
        size,
        srcs = None,
        copts = [],
        deps = [],
        tags = [],
        precompiled = None,
        **kwargs):
    """A test with GoogleTest: of NAME.cc, unless srcs are given.

    Args:
      name: of the test.
      size: as of cc_test, without a default, so that everybody chooses one.
      srcs: as of cc_test.
      copts: as of cc_test.
      deps: as of cc_test. GoogleTest is added, with its main(); "@googletest//:gtest" among them
        says that the test has its own.
      tags: besides "cpu", and those of _TAGS_OF_DEPS.
      precompiled: the headers of //tools/precompiled that the test takes: "modules" for a test with
        modules or optimizers. By default "tensors" for a test with LibTorch among its `deps`, and
        "torch_free" for any other.
      **kwargs: passed to the cc_test.
    """
    pch = precompiled or ("tensors" if _TORCH in deps else "torch_free")
    device = [_own(_RANK_DEVICE)] if _has_rank_device(deps) else []
    cc_test(
        name = name,
        size = size,
        srcs = _program_srcs(name, srcs) + _SUPPRESSIONS,
        tags = _tags(tags, deps),
        **dict(kwargs, **_precompiled(pch, copts, _with_main(deps) + device))
    )

def ddp_cc_fuzz(name, deps = [], **kwargs):
    """A fuzz target, and `NAME_test`, which runs its seeds with any compiler.

    NAME itself is a libFuzzer program. Only --config=fuzz can build it, and no pattern such as
    `//...` reaches it: `tools/test --fuzz` finds it by its tag. See testing/fuzz_target.h.

    Args:
      name: `<stem>_fuzz`, of `<stem>_fuzz.cc`, beside the code that it fuzzes.
      deps: as of cc_binary, besides //testing:fuzz_target.
      **kwargs: passed to both programs.
    """
    ddp_cc_binary(
        name = name,
        testonly = True,
        linkopts = select(
            {_own("//tools:with_fuzzer"): ["-fsanitize=fuzzer"]},
            no_match_error = "a fuzz target is built with --config=fuzz",
        ),
        tags = [
            "fuzz",
            "manual",
        ],
        deps = deps + [
            _own("//testing:fuzz_engine"),
            _own("//testing:fuzz_target"),
        ],
        **kwargs
    )
    cc_test(
        name = name + "_test",
        size = "small",
        srcs = _program_srcs(name, None),
        copts = _copts([]),
        tags = ["cpu"],
        deps = deps + [
            _own("//testing:fuzz_replay"),
            _own("//testing:fuzz_target"),
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
        cmd = "$(location %s) %s $@ $(SRCS)" % (_own("//tools:embed"), name),
        tools = [_own("//tools:embed")],
    )
    cc_library(name = name, hdrs = [name + ".h"], **kwargs)

_COMMON_ATTRIBUTES = ["tags", "target_compatible_with", "testonly", "visibility"]

def ddp_trainer(name, srcs, deps = [], data = [], args = [], **kwargs):
    """A training program; `NAME.launch` runs it under ddprun, and `NAME.bundle` ships both.

        bazel run //my:train.launch -- --nproc-per-node=2 -- --lr=0.1

    What stands before the second `--` goes to ddprun, what follows to the program.
    `NAME.bundle_without_torch` is for machines that have LibTorch. See docs/deployment.md.

    Args:
      name: of the program.
      srcs: as of cc_binary.
      deps: as of cc_binary.
      data: files that the program finds in its runfiles.
      args: given to the program before the user's own.
      **kwargs: passed to the cc_binary; what all have, to the other targets too.
    """
    ddp_cc_binary(name = name, srcs = srcs, deps = deps, data = data, **kwargs)
    common = {key: kwargs[key] for key in _COMMON_ATTRIBUTES if key in kwargs}
    sh_binary(
        name = name + ".launch",
        srcs = [_own("//tools:launch.sh")],
        args = [
            "$(rootpath %s)" % _own("//launcher:ddprun"),
            "$(rootpath :%s)" % name,
            str(len(args)),
        ] + args,
        data = [
            _own("//launcher:ddprun"),
            ":" + name,
        ] + data,
        **common
    )
    for form in ["bundle", "bundle_without_torch"]:
        ddp_bundle(
            name = name + "." + form,
            trainer = ":" + name,
            arguments = args,
            without_torch = form == "bundle_without_torch",
            **dict(common, tags = common.get("tags", []) + ["manual"])
        )
