load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "openssl",
    linkopts = %{linkopts},
    visibility = ["//visibility:public"],
)
