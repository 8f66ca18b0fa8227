"""Every fetched thing: its version and its SHA-256. The one place to change when one is raised.

The wheels are for CPython 3.12 on x86-64. Only their C++ parts are used, so the host's own Python
may be of any version.
"""

# The LibTorch that is fetched unless DDP_TORCH_VERSION names another one of TORCH_WHEELS.
TORCH_VERSION = "2.15.0"

WHEEL_PYTHON = "3.12"

# The CUDA libraries that libtorch_cpu.so of a CUDA wheel is linked to.
_CUDA_13_0 = {
    "nvidia-cuda-cupti==13.0.85": "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
    "nvidia-cuda-runtime==13.0.96": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
}
_CUDA_13_2 = {
    "nvidia-cuda-cupti==13.2.86": "8fa29f15dd8336181f961764d9d95236fc6b931dd0c8fcf8cd70aab0c310b586",
    "nvidia-cuda-runtime==13.2.86": "3498247680dfddce31bad102af7e3e26fc795342a3cac64722bb0fa95e7f60f0",
}

# NCCL releases, as the torch wheels pin them.
_NCCL_2_28 = {
    "nvidia-nccl-cu13==2.28.9": "e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42",
}
_NCCL_2_29 = {
    "nvidia-nccl-cu13==2.29.7": "edd81538446786ec3b73972543e53bb43bcaf0bfc8ef76cb679fcc390ffe136d",
}
_NCCL_2_30 = {
    "nvidia-nccl-cu13==2.30.7": "cefa7fdb9710efd0f39c5f1be1d61ff6fc9a996c451265bd7fbdcf9455ed4b50",
}

# Supported LibTorch version -> the torch wheel's SHA-256, and what that wheel is linked to:
# {"requirement": "SHA-256 of the wheel file"}.
TORCH_WHEELS = {
    "2.11.0": struct(
        sha256 = "0f68f4ac6d95d12e896c3b7a912b5871619542ec54d3649cf48cc1edd4dd2756",
        cuda = _CUDA_13_0,
        nccl = _NCCL_2_28,
    ),
    "2.12.0": struct(
        sha256 = "4b4f64c2c2b11f7510d93dd6412b87025ff6eddd6bb61c3b5a3d892ea20c4756",
        cuda = _CUDA_13_0,
        nccl = _NCCL_2_29,
    ),
    "2.12.1": struct(
        sha256 = "649e4ced014ba646f76f8cb9c9726735a6323eb321b7919f942790a923f90921",
        cuda = _CUDA_13_0,
        nccl = _NCCL_2_29,
    ),
    "2.13.0": struct(
        sha256 = "796633c4cdf0fe2cdced72d8f88f22e73dbcfce83132763162f6d4bff13b820b",
        cuda = _CUDA_13_0,
        nccl = _NCCL_2_29,
    ),
    "2.14.0": struct(
        sha256 = "fecffb58f51fd643d213acd68da21cc3fc19bea05a3bc64b4ee55128f47a4963",
        cuda = _CUDA_13_0,
        nccl = _NCCL_2_30,
    ),
    "2.14.1": struct(
        sha256 = "23011fe29a99b591eabb3a31a25080c62e2c2f0690a3c798744e5489dae50451",
        cuda = _CUDA_13_0,
        nccl = _NCCL_2_30,
    ),
    "2.15.0": struct(
        sha256 = "6d8c86f4e33a9f12a58149bd9b0d64351632b8eb44479be8ff85e5389932dd79",
        cuda = _CUDA_13_2,
        nccl = _NCCL_2_30,
    ),
}

def chosen_torch_version(ctx):
    """Returns the LibTorch version to fetch: DDP_TORCH_VERSION, or TORCH_VERSION.

    Args:
      ctx: the context of a repository rule that lists DDP_TORCH_VERSION in its environ.
    """
    version = ctx.os.environ.get("DDP_TORCH_VERSION", "") or TORCH_VERSION
    if version not in TORCH_WHEELS:
        fail("DDP_TORCH_VERSION=%s is not a version that can be fetched; these are: %s. To use " %
             (version, ", ".join(TORCH_WHEELS.keys())) +
             "another one, install it and name its folder in TORCH_PATH.")
    return version
