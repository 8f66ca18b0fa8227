load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "prometheus_cpp",
    linkopts = %{linkopts},
    visibility = ["//visibility:public"],
)
