# find_package(ddp) defines
#   ddp::ddp         the shared library
#   ddp::ddp_static  the static one
#   ddp::ddprun      the launcher
# LibTorch is that of an earlier find_package(Torch), else the folder TORCH_PATH (a variable of CMake
# or of the environment), else what find_package(Torch) finds.

get_filename_component(_ddp_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

if(Torch_FOUND AND TORCH_INSTALL_PREFIX)
  set(_ddp_torch "${TORCH_INSTALL_PREFIX}")
elseif(TORCH_PATH)
  set(_ddp_torch "${TORCH_PATH}")
elseif(DEFINED ENV{TORCH_PATH})
  set(_ddp_torch "$ENV{TORCH_PATH}")
else()
  include(CMakeFindDependencyMacro)
  find_dependency(Torch)
  set(_ddp_torch "${TORCH_INSTALL_PREFIX}")
endif()
get_filename_component(_ddp_torch "${_ddp_torch}" ABSOLUTE)

# The classes of LibTorch that ddp builds on change from release to release.
set(_ddp_torch_version "none")
set(_ddp_version_file "${_ddp_torch}/include/torch/headeronly/version.h")
if(EXISTS "${_ddp_version_file}")
  file(STRINGS "${_ddp_version_file}" _ddp_line REGEX "^ *\"[0-9.]+\"")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" _ddp_torch_version "${_ddp_line}")
endif()
if(NOT _ddp_torch_version VERSION_EQUAL "@TORCH_VERSION@")
  set(ddp_NOT_FOUND_MESSAGE "this ddp was built with LibTorch @TORCH_VERSION@; \
${_ddp_torch} holds ${_ddp_torch_version}. Build ddp with TORCH_PATH set to that folder.")
  set(ddp_FOUND FALSE)
  return()
endif()

if(TARGET ddp::ddp)
  return()
endif()

# Only the libraries of LibTorch that ddp itself needs. A program for GPUs adds ${TORCH_LIBRARIES}.
add_library(ddp::torch INTERFACE IMPORTED)
foreach(_ddp_name @TORCH_LIBRARIES@)
  set_property(TARGET ddp::torch APPEND PROPERTY INTERFACE_LINK_LIBRARIES
               "${_ddp_torch}/lib/lib${_ddp_name}.so")
endforeach()
set_target_properties(ddp::torch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES
    "${_ddp_torch}/include;${_ddp_torch}/include/torch/csrc/api/include"
  INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=1")

# The linker, too, looks for the distribution's libraries that these need in lib/ddp/.
set(_ddp_interface
  INTERFACE_INCLUDE_DIRECTORIES "${_ddp_root}/include"
  INTERFACE_COMPILE_FEATURES cxx_std_20
  INTERFACE_LINK_OPTIONS "LINKER:-rpath-link,${_ddp_root}/lib/ddp")

add_library(ddp::ddp SHARED IMPORTED)
set_target_properties(ddp::ddp PROPERTIES ${_ddp_interface}
  IMPORTED_LOCATION "${_ddp_root}/lib/@SONAME@"
  IMPORTED_SONAME "@SONAME@"
  INTERFACE_LINK_LIBRARIES ddp::torch)

# The static library links the distribution's libraries that lie in lib/ddp/. DT_RPATH, unlike
# DT_RUNPATH, finds what these need themselves.
set(_ddp_carried ddp::torch)
foreach(_ddp_name @CARRIED@)
  list(APPEND _ddp_carried "${_ddp_root}/lib/ddp/${_ddp_name}")
endforeach()
add_library(ddp::ddp_static STATIC IMPORTED)
set_target_properties(ddp::ddp_static PROPERTIES ${_ddp_interface}
  IMPORTED_LOCATION "${_ddp_root}/lib/libddp.a"
  INTERFACE_LINK_LIBRARIES "${_ddp_carried}")
set_property(TARGET ddp::ddp_static APPEND PROPERTY INTERFACE_LINK_OPTIONS
             "LINKER:--disable-new-dtags")

add_executable(ddp::ddprun IMPORTED)
set_target_properties(ddp::ddprun PROPERTIES IMPORTED_LOCATION "${_ddp_root}/bin/ddprun")
