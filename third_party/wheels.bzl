"""Fetching and unpacking Python wheels for the C++ libraries inside them.

pip finds and downloads a wheel, since it knows the user's index, proxies, certificates and
passwords. Bazel checks the hash, unpacks the file and keeps it in the repository cache, from which
every other checkout on the machine takes it, without pip and without a network.
"""

load("//third_party:versions.bzl", "WHEEL_PYTHON")

# pip matches a platform tag exactly, so every tag that a wheel for this glibc may carry is named.
_PLATFORMS = ["manylinux2014_x86_64"] + ["manylinux_2_%d_x86_64" % minor for minor in range(17, 37)]

def _unpack(ctx, url, sha256, destination, allow_fail = False):
    # A name that ends in .whl is unknown to Bazel before 8.3.
    return ctx.download_and_extract(
        url = url,
        output = destination,
        sha256 = sha256,
        type = "zip",
        allow_fail = allow_fail,
    ).success

def _download_by_pip(ctx, requirement, sha256):
    """Returns the wheel's path."""
    python = ctx.which("python3")
    if not python:
        fail("python3 is needed to fetch %s. Run: apt-get install python3 python3-pip" %
             requirement)
    ctx.file("wheels/requirements.txt", "%s --hash=sha256:%s\n" % (requirement, sha256))
    platforms = []
    for platform in _PLATFORMS:
        platforms += ["--platform", platform]
    ctx.report_progress("fetching " + requirement)
    result = ctx.execute(
        [python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"] +
        ["--implementation", "cp", "--python-version", WHEEL_PYTHON, "--dest", "wheels"] +
        ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off"] +
        platforms + ["-r", "wheels/requirements.txt"],
        timeout = 3600,
        quiet = False,
    )
    if result.return_code != 0:
        fail(("Could not fetch %s by pip (is python3-pip installed, and the package registry " +
              "reachable?):\n%s") % (requirement, result.stderr))
    return [file for file in ctx.path("wheels").readdir() if file.basename.endswith(".whl")][0]

def fetch_wheels(ctx, wheels, destination):
    """Downloads `wheels` ({"name==version": sha256}) and unpacks them all below `destination`.

    Fails with pip's own words, and with the name of the package when a hash differs.
    """
    for requirement, sha256 in wheels.items():
        # Bazel looks into its cache first. The address is that of nothing: it costs no time.
        nowhere = "file:///not-in-the-repository-cache/" + requirement
        if not _unpack(ctx, nowhere, sha256, destination, allow_fail = True):
            wheel = _download_by_pip(ctx, requirement, sha256)
            ctx.report_progress("unpacking " + wheel.basename)
            _unpack(ctx, "file://%s" % wheel, sha256, destination)
            ctx.delete("wheels")
