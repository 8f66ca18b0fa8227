load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "glog",
    linkopts = %{linkopts},
    visibility = ["//visibility:public"],
)
