"""`NAME.bundle` of a ddp_trainer: see docs/deployment.md."""

def _bundle_impl(ctx):
    for argument in ctx.attr.arguments:
        if "$(" in argument:
            fail(("%s: the trainer's args hold %r, and nothing expands this on another machine. " +
                  "Let the program look for the file in its runfiles.") % (ctx.label, argument))
    folder = ctx.actions.declare_directory(ctx.label.name)
    tar = ctx.actions.declare_file(ctx.label.name + ".tar")
    trainer = ctx.executable.trainer
    info = ctx.attr.trainer[DefaultInfo]
    data = {
        _runfiles_path(ctx, file): file
        for file in info.default_runfiles.files.to_list()
        if file != trainer
    }

    # Bazel 7 and newer: how the runfiles library finds a repository by its name.
    mapping = getattr(info.files_to_run, "repo_mapping_manifest", None)
    if mapping:
        data["_repo_mapping"] = mapping
    listed = ctx.actions.declare_file(ctx.label.name + ".data")
    ctx.actions.write(listed, "".join([
        "%s\t%s\n" % (path, file.path)
        for path, file in data.items()
    ]))
    arguments = ctx.actions.args()
    arguments.add(folder.path, format = "--output=%s")
    arguments.add(tar, format = "--tar=%s")
    arguments.add(trainer, format = "--trainer=%s")
    arguments.add(ctx.executable._ddprun, format = "--ddprun=%s")
    arguments.add(ctx.file._run, format = "--run=%s")
    arguments.add(listed, format = "--data=%s")
    if ctx.attr.without_torch:
        arguments.add("--without-torch")
    arguments.add("--arguments")
    arguments.add_all(ctx.attr.arguments)
    ctx.actions.run(
        executable = ctx.executable._pack,
        arguments = [arguments],
        inputs = data.values() + [
            ctx.executable._ddprun,
            ctx.file._installed,
            ctx.file._run,
            listed,
            trainer,
        ],
        outputs = [folder, tar],
        mnemonic = "Bundle",
        progress_message = "Packing %s" % ctx.label,
        use_default_shell_env = True,
        # A gigabyte that is made in seconds is not worth its place in a cache.
        execution_requirements = {"local": "", "no-cache": ""},
    )
    made = [folder, tar]
    return [DefaultInfo(files = depset(made), runfiles = ctx.runfiles(files = made))]

def _runfiles_path(ctx, file):
    if file.short_path.startswith("../"):
        return file.short_path[3:]
    return ctx.workspace_name + "/" + file.short_path

ddp_bundle = rule(
    implementation = _bundle_impl,
    attrs = {
        "arguments": attr.string_list(doc = "What the trainer gets before the user's own flags."),
        "trainer": attr.label(cfg = "target", executable = True, mandatory = True),
        "without_torch": attr.bool(doc = "Whether LibTorch is the other machine's."),
        "_ddprun": attr.label(
            cfg = "target",
            default = "//launcher:ddprun",
            executable = True,
        ),
        # The libraries are the system's: packed again when its packages have changed.
        "_installed": attr.label(
            allow_single_file = True,
            default = "@installed_packages//:status",
        ),
        "_pack": attr.label(
            cfg = "exec",
            default = "//tools/bundle:pack",
            executable = True,
        ),
        "_run": attr.label(
            allow_single_file = True,
            default = "//tools/bundle:run.sh",
        ),
    },
    doc = "A folder and a tar with all that a trainer needs on another machine.",
)
