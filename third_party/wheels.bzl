"""Fetching and unpacking Python wheels for the C++ libraries inside them."""

load("//third_party:versions.bzl", "WHEEL_PYTHON")

# pip matches a platform tag exactly, so every tag that a wheel for this glibc may carry is named.
_PLATFORMS = ["manylinux2014_x86_64"] + ["manylinux_2_%d_x86_64" % minor for minor in range(17, 37)]

def fetch_wheels(ctx, wheels, destination):
    """Downloads `wheels` ({"name==version": sha256}) and unpacks them all below `destination`.

    Fails with pip's own words, and with the name of the package when a hash differs.
    """
    python = ctx.which("python3")
    if not python:
        fail("python3 is needed to fetch %s. Run: apt-get install python3 python3-pip" %
             wheels.keys())
    requirements = "".join(["%s --hash=sha256:%s\n" % item for item in wheels.items()])
    ctx.file("requirements.txt", requirements)
    platforms = []
    for platform in _PLATFORMS:
        platforms += ["--platform", platform]
    ctx.report_progress("fetching " + ", ".join(wheels.keys()))
    result = ctx.execute(
        [python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"] +
        ["--implementation", "cp", "--python-version", WHEEL_PYTHON, "--dest", "wheels"] +
        ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off"] +
        platforms + ["-r", "requirements.txt"],
        timeout = 3600,
        quiet = False,
    )
    if result.return_code != 0:
        fail(("Could not fetch %s by pip (is python3-pip installed, and the package registry " +
              "reachable?):\n%s") %
             (", ".join(wheels.keys()), result.stderr))
    for wheel in ctx.path("wheels").readdir():
        ctx.report_progress("unpacking " + wheel.basename)
        result = ctx.execute([python, "-m", "zipfile", "-e", wheel, destination], timeout = 1800)
        if result.return_code != 0:
            fail("Could not unpack %s: %s" % (wheel, result.stderr))
    ctx.delete("wheels")
