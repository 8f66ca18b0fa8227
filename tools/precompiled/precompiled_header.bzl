"""A rule for a precompiled header."""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "CPP_COMPILE_ACTION_NAME")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _command(ctx, toolchain, features, header, output):
    context = cc_common.merge_cc_infos(
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    ).compilation_context
    variables = cc_common.create_compile_variables(
        cc_toolchain = toolchain,
        feature_configuration = features,
        user_compile_flags = (
            ctx.attr.copts + ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts
        ),
        source_file = header.path,
        output_file = output.path,
        use_pic = True,
        include_directories = context.includes,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        preprocessor_defines = context.defines,
    )
    flags = cc_common.get_memory_inefficient_command_line(
        feature_configuration = features,
        action_name = CPP_COMPILE_ACTION_NAME,
        variables = variables,
    )
    return context.headers, ["-x", "c++-header"] + flags

def _precompiled_header_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )

    # A compiler looks for NAME.gch beside the NAME that it finds.
    header = ctx.actions.declare_file(ctx.label.name + ".h")
    output = ctx.actions.declare_file(header.basename + ".gch")
    ctx.actions.symlink(output = header, target_file = ctx.file.header)
    headers, arguments = _command(ctx, toolchain, features, header, output)
    ctx.actions.run(
        mnemonic = "CppPrecompile",
        progress_message = "Precompiling %s" % ctx.file.header.short_path,
        executable = cc_common.get_tool_for_action(
            feature_configuration = features,
            action_name = CPP_COMPILE_ACTION_NAME,
        ),
        arguments = arguments,
        inputs = depset([header, ctx.file.header], transitive = [headers, toolchain.all_files]),
        outputs = [output],
        execution_requirements = {"no-sandbox": "1"},  # thousands of headers; see .bazelrc
    )
    context = cc_common.create_compilation_context(
        headers = depset([header, output]),
        quote_includes = depset([header.dirname]),
    )
    return [
        DefaultInfo(files = depset([output])),
        CcInfo(compilation_context = context),
    ]

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    doc = """Compiles a header once for all targets that include it first.

A target depends on it and has the copts ["-include", "NAME.h"]. The compiler takes the compiled
form only where all its flags fit; otherwise it reads the header, which gives the same program.
""",
    attrs = {
        "header": attr.label(allow_single_file = [".h"], mandatory = True),
        "deps": attr.label_list(providers = [CcInfo], doc = "of the header"),
        "copts": attr.string_list(doc = "of the targets that include it"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
