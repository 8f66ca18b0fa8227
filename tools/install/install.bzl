"""The install tree: what a project needs that is built by CMake, make or another build tool."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _install_tree_impl(ctx):
    if ctx.label.workspace_name:
        fail("the install tree is made in a checkout of @%s: run bazel build //%s:%s there" %
             (ctx.label.workspace_name, ctx.label.package, ctx.label.name))
    toolchain = find_cpp_toolchain(ctx)
    info = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    headers = info.compilation_context.headers.to_list()
    objects = []
    link_flags = []
    for linker_input in info.linking_context.linker_inputs.to_list():
        link_flags += linker_input.user_link_flags
        for library in linker_input.libraries:
            objects += library.pic_objects or library.objects
    ours = [
        header
        for header in headers
        if not header.owner.workspace_name and header.extension != "gch"  # precompiled
    ]
    tree = ctx.actions.declare_directory(ctx.label.name)
    specification = ctx.actions.declare_file(ctx.label.name + ".json")
    ctx.actions.write(specification, json.encode({
        "ar": toolchain.ar_executable,
        "compiler": toolchain.compiler_executable,
        "ddprun": ctx.executable.ddprun.path,
        "headers": {header.short_path: header.path for header in ours},
        "includes": info.compilation_context.system_includes.to_list(),
        "link_flags": link_flags + ctx.fragments.cpp.linkopts,
        "objects": [file.path for file in objects],
        "public_headers": ctx.file.public_headers.path,
        "templates": [file.path for file in ctx.files.templates],
    }))
    made_of = depset(
        objects + headers + ctx.files.templates +
        [specification, ctx.file.public_headers, ctx.file._installed, ctx.executable.ddprun],
        transitive = [toolchain.all_files],
    )
    ctx.actions.run(
        executable = ctx.executable._make_tree,
        arguments = ["tree", specification.path, tree.path],
        inputs = made_of,
        outputs = [tree],
        mnemonic = "InstallTree",
        progress_message = "Making the install tree",
        use_default_shell_env = True,
        execution_requirements = {"no-sandbox": "1"},  # LibTorch has 8,051 headers
    )
    checked = ctx.actions.declare_file(ctx.label.name + ".headers_checked")
    ctx.actions.run(
        executable = ctx.executable._make_tree,
        arguments = ["check_headers", specification.path, tree.path, checked.path],
        inputs = depset([tree], transitive = [made_of]),
        outputs = [checked],
        mnemonic = "CheckHeaders",
        progress_message = "Compiling each public header by itself",
        use_default_shell_env = True,
        execution_requirements = {"no-sandbox": "1"},
    )
    return [
        DefaultInfo(files = depset([tree])),
        OutputGroupInfo(headers_checked = depset([checked])),
    ]

install_tree = rule(
    implementation = _install_tree_impl,
    attrs = {
        "ddprun": attr.label(executable = True, cfg = "target", mandatory = True),
        "deps": attr.label_list(
            providers = [CcInfo],
            doc = "What libddp holds, with all that it depends on.",
        ),
        "public_headers": attr.label(
            allow_single_file = True,
            mandatory = True,
            doc = "The list of headers to install, with what they include.",
        ),
        "templates": attr.label_list(
            allow_files = True,
            doc = "Files of lib/, with @NAME@ for what is known when the tree is made.",
        ),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
        # The libraries are the system's: made again when its packages have changed.
        "_installed": attr.label(
            allow_single_file = True,
            default = "@installed_packages//:status",
        ),
        "_make_tree": attr.label(
            cfg = "exec",
            default = Label("//tools/install:make_tree"),
            executable = True,
        ),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
    doc = """A folder with include/, lib/, bin/ and what CMake and pkg-config read.

The output group `headers_checked` is a proof that each installed header compiles by itself.
""",
)
