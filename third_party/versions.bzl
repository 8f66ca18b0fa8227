"""Every fetched thing: its version and its SHA-256. The one place to change when one is raised.

The wheels are for CPython 3.12 on x86-64. Only their C++ parts are used, so the host's own Python
may be of any version.
"""

TORCH_VERSION = "2.11.0"

WHEEL_PYTHON = "3.12"

# requirement -> SHA-256 of the wheel file
TORCH_WHEELS = {
    "torch==2.11.0": "0f68f4ac6d95d12e896c3b7a912b5871619542ec54d3649cf48cc1edd4dd2756",
    "nvidia-cuda-cupti==13.0.85": "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
    "nvidia-cuda-runtime==13.0.96": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
}

NCCL_WHEELS = {
    "nvidia-nccl-cu13==2.28.9": "e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42",
}
