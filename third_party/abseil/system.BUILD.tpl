load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "abseil",
    linkopts = %{linkopts},
    visibility = ["//visibility:public"],
)
