"""What Bazel 4.2.3 itself expects from the network, generated on the spot instead.

Its C++ toolchain loads @rules_cc and @rules_java, and its tests @remote_coverage_tools. Newer
Bazel gets the real repositories; see ddp_deps(). Our own files load every rule that a newer Bazel
has in a repository of its own, so @rules_shell has a stub too.
"""

_RULES = [
    "cc_binary",
    "cc_import",
    "cc_library",
    "cc_test",
    "cc_toolchain",
    "cc_toolchain_suite",
    "fdo_profile",
    "objc_library",
]

def _rules_cc_impl(ctx):
    ctx.file("BUILD.bazel", "")
    ctx.file("cc/BUILD.bazel", "")
    ctx.file("cc/defs.bzl", "".join(["%s = native.%s\n" % (rule, rule) for rule in _RULES]))
    for rule in ["cc_binary", "cc_library", "cc_test"]:
        ctx.file("cc/%s.bzl" % rule, "%s = native.%s\n" % (rule, rule))

rules_cc_stub = repository_rule(
    implementation = _rules_cc_impl,
    doc = "@rules_cc as a re-export of Bazel's built-in rules.",
)

def _rules_shell_impl(ctx):
    ctx.file("BUILD.bazel", "")
    ctx.file("shell/BUILD.bazel", "")
    for rule in ["sh_binary", "sh_library", "sh_test"]:
        ctx.file("shell/%s.bzl" % rule, "%s = native.%s\n" % (rule, rule))

rules_shell_stub = repository_rule(
    implementation = _rules_shell_impl,
    doc = "@rules_shell as a re-export of Bazel's built-in rules.",
)

def _coverage_tools_impl(ctx):
    ctx.file("BUILD.bazel", "".join([
        "filegroup(name = \"%s\", visibility = [\"//visibility:public\"])\n" % name
        for name in ["coverage_report_generator", "lcov_merger", "Main"]
    ]))

    # Bazel asks for the tools under this package.
    java = "tools/test/CoverageOutputGenerator/java"
    ctx.file(java + "/com/google/devtools/coverageoutputgenerator/BUILD.bazel", "".join([
        "filegroup(name = \"%s\", visibility = [\"//visibility:public\"])\n" % name
        for name in ["Main", "coverage_report_generator"]
    ]))

coverage_tools_stub = repository_rule(
    implementation = _coverage_tools_impl,
    doc = "@remote_coverage_tools without tools: `bazel coverage` does not work on 4.2.3.",
)

def _installed_or_fail_impl(ctx):
    path = ctx.path(ctx.attr.path)
    if not path.exists:
        fail("%s is missing. Run: apt-get install %s" % (ctx.attr.path, ctx.attr.apt_package))
    for child in path.readdir():
        ctx.symlink(child, child.basename)

installed_repository = repository_rule(
    implementation = _installed_or_fail_impl,
    attrs = {
        "apt_package": attr.string(mandatory = True),
        "path": attr.string(mandatory = True),
    },
    local = True,
    doc = "A repository that a system package has unpacked.",
)
