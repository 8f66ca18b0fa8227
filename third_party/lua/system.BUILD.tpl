load("@rules_cc//cc:defs.bzl", "cc_library")

# LuaJIT speaks Lua 5.1, as Redis does. Only tests use it.
cc_library(
    name = "lua",
    testonly = True,
    linkopts = %{linkopts},
    visibility = ["//visibility:public"],
)
