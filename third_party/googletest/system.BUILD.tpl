load("@rules_cc//cc:defs.bzl", "cc_library")

# The test brings its own main.
cc_library(
    name = "gtest",
    linkopts = [opt for opt in %{linkopts} if opt not in ("-lgtest_main", "-lgmock_main")],
    visibility = ["//visibility:public"],
)

cc_library(
    name = "gtest_main",
    linkopts = %{linkopts},
    visibility = ["//visibility:public"],
)
