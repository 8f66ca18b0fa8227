load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "gflags",
    linkopts = %{linkopts},
    visibility = ["//visibility:public"],
)
