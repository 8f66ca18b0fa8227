"""A library that the operating system provides: found by pkg-config, linked by name.

Its headers lie in the compiler's own search path, so the target has no hdrs and no includes: adding
/usr/include by hand changes the search order and breaks #include_next.
"""

def _words(text):
    return [word for word in text.replace("\n", " ").split(" ") if word]

def _system_library_impl(ctx):
    if not ctx.path("/usr/include/" + ctx.attr.header).exists:
        fail("%s: <%s> is missing. Run: apt-get install %s" %
             (ctx.name, ctx.attr.header, ctx.attr.apt_package))
    linkopts = []
    for module, without_pkg_config in ctx.attr.pkg_config.items():
        found = ctx.which("pkg-config") and ctx.execute(["pkg-config", "--libs", module])
        words = [without_pkg_config]
        if found and found.return_code == 0:
            words = _words(found.stdout)
        linkopts += [word for word in words if word and word not in linkopts]
    ctx.template("BUILD.bazel", ctx.attr.build_file, {"%{linkopts}": repr(linkopts)})

system_library = repository_rule(
    implementation = _system_library_impl,
    attrs = {
        "apt_package": attr.string(mandatory = True),
        "build_file": attr.label(mandatory = True, allow_single_file = True),
        "header": attr.string(
            mandatory = True,
            doc = "A header below /usr/include that proves it is there.",
        ),
        "pkg_config": attr.string_dict(
            mandatory = True,
            doc = "Module -> what to link without a .pc file.",
        ),
    },
    configure = True,
    environ = ["PATH", "PKG_CONFIG_PATH"],
    local = True,
    doc = "Labels stay the same wherever the library comes from.",
)

def _installed_packages_impl(ctx):
    ctx.file("BUILD.bazel", "exports_files([\"status\"], visibility = [\"//visibility:public\"])\n")
    ctx.symlink("/var/lib/dpkg/status", "status")

installed_packages = repository_rule(
    implementation = _installed_packages_impl,
    local = True,
    doc = "`status`: the system's packages and their versions, for what copies files of theirs.",
)
