load("@rules_cc//cc:defs.bzl", "cc_library")

# NCCL_VERSION_CODE %{version}
cc_library(
    name = "nccl",
    hdrs = ["include/nccl.h"],
    includes = ["include"],
    linkopts = [
        "-L%{lib}",
        "-l:libnccl.so.2",
        "-Wl,-rpath,%{lib}",
    ],
    visibility = ["//visibility:public"],
)
