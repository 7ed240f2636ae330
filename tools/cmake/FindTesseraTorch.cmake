# Finds libtorch; defines tessera::torch (CPU) and, with TESSERA_CUDA or TESSERA_TEST_GPU, tessera::torch_cuda. Sets
# TesseraTorch_VERSION and TesseraTorch_PREFIX.
#
# Replaces find_package(Torch), which for a CUDA build of libtorch enables the CUDA language and requires the whole
# toolkit, even for programs that use no GPU.
#
# Searches CMAKE_PREFIX_PATH (a libtorch, a site-packages/torch, or its share/cmake), then TESSERA_TORCH_DEFAULT_DIR:
# the libtorch that an installed Tessera was built with, or the wheel that tools/setup.sh unpacks in .deps/.

if(NOT TESSERA_TORCH_DEFAULT_DIR)
  set(TESSERA_TORCH_DEFAULT_DIR "${CMAKE_CURRENT_LIST_DIR}/../../.deps/torch-2.11.0/torch")
endif()
# A build tree configured with another CMAKE_PREFIX_PATH must search again.
if(DEFINED TESSERA_TORCH_PREFIX_PATH AND NOT TESSERA_TORCH_PREFIX_PATH STREQUAL "${CMAKE_PREFIX_PATH}")
  foreach(_found INCLUDE_DIR CPU_LIBRARY CUDA_LIBRARY)
    unset(TESSERA_TORCH_${_found} CACHE)
  endforeach()
  unset(TESSERA_C10_LIBRARY CACHE)
  unset(TESSERA_C10_CUDA_LIBRARY CACHE)
endif()
set(TESSERA_TORCH_PREFIX_PATH "${CMAKE_PREFIX_PATH}" CACHE INTERNAL "where libtorch was looked for last time")
find_path(TESSERA_TORCH_INCLUDE_DIR torch/headeronly/version.h
  HINTS ${CMAKE_PREFIX_PATH} PATHS "${TESSERA_TORCH_DEFAULT_DIR}"
  PATH_SUFFIXES include ../../include)
find_library(TESSERA_TORCH_CPU_LIBRARY torch_cpu HINTS "${TESSERA_TORCH_INCLUDE_DIR}/../lib" NO_DEFAULT_PATH)
find_library(TESSERA_C10_LIBRARY c10 HINTS "${TESSERA_TORCH_INCLUDE_DIR}/../lib" NO_DEFAULT_PATH)

if(TESSERA_TORCH_INCLUDE_DIR)
  file(STRINGS "${TESSERA_TORCH_INCLUDE_DIR}/torch/headeronly/version.h" _version REGEX "define TORCH_VERSION_M")
  string(REGEX REPLACE ".*VERSION_MAJOR ([0-9]+).*VERSION_MINOR ([0-9]+).*" "\\1.\\2" TesseraTorch_VERSION "${_version}")
  get_filename_component(TesseraTorch_PREFIX "${TESSERA_TORCH_INCLUDE_DIR}/.." ABSOLUTE)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TesseraTorch
  REQUIRED_VARS TESSERA_TORCH_CPU_LIBRARY TESSERA_C10_LIBRARY TESSERA_TORCH_INCLUDE_DIR
  VERSION_VAR TesseraTorch_VERSION
  REASON_FAILURE_MESSAGE "run tools/setup.sh (or make build), or pass -DCMAKE_PREFIX_PATH=<libtorch>")
mark_as_advanced(TESSERA_TORCH_INCLUDE_DIR TESSERA_TORCH_CPU_LIBRARY TESSERA_C10_LIBRARY)

if(TesseraTorch_FOUND AND NOT TARGET tessera::torch)
  include("${CMAKE_CURRENT_LIST_DIR}/TesseraSharedRuntime.cmake")
  get_filename_component(_torch_lib "${TESSERA_TORCH_CPU_LIBRARY}" DIRECTORY)
  set(_torch_includes "${TESSERA_TORCH_INCLUDE_DIR}" "${TESSERA_TORCH_INCLUDE_DIR}/torch/csrc/api/include")

  # GLOBAL: a project that adds Tessera as a subdirectory links these too.
  add_library(tessera::c10 SHARED IMPORTED GLOBAL)
  set_target_properties(tessera::c10 PROPERTIES IMPORTED_LOCATION "${TESSERA_C10_LIBRARY}" IMPORTED_NO_SONAME ON)
  add_library(tessera::torch SHARED IMPORTED GLOBAL)
  set_target_properties(tessera::torch PROPERTIES
    IMPORTED_LOCATION "${TESSERA_TORCH_CPU_LIBRARY}" IMPORTED_NO_SONAME ON
    INTERFACE_LINK_LIBRARIES tessera::c10
    # libtorch is compiled with NDEBUG. Without it, inline functions of its headers assert states that libtorch and
    # Tessera's libraries do not keep (the reference count in ~intrusive_ptr_target, RecordFunction::inputs_valid_). The
    # linker takes one version for all files. A program turns its own asserts on again after the headers: guide.md.
    INTERFACE_COMPILE_DEFINITIONS NDEBUG
    INTERFACE_INCLUDE_DIRECTORIES "${_torch_includes}"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${_torch_includes}")

  # The OpenMP library of libtorch's threads, for our files that use OpenMP.
  add_library(tessera::torch_openmp INTERFACE IMPORTED GLOBAL)
  file(GLOB _openmp "${_torch_lib}/libgomp*.so*" "${_torch_lib}/libiomp5.so")
  list(APPEND _openmp gomp)
  list(GET _openmp 0 _openmp)
  set_target_properties(tessera::torch_openmp PROPERTIES INTERFACE_LINK_LIBRARIES "${_openmp}")

  # libtorch_cpu.so of a CUDA build needs libcudart and libcupti. Its RPATH is its own folder, where tools/setup.sh puts
  # them; for another libtorch, uses the toolkit's.
  file(GLOB _runtime "${_torch_lib}/../../nvidia/*/lib/libcupti.so.*" "${_torch_lib}/libcupti*.so*")
  if(NOT _runtime)
    find_library(TESSERA_CUPTI_LIBRARY NAMES cupti libcupti.so.13 libcupti.so.12
      HINTS "$ENV{CUDA_HOME}" /usr/local/cuda PATH_SUFFIXES lib64 lib extras/CUPTI/lib64)
    find_library(TESSERA_CUDART_LIBRARY NAMES cudart libcudart.so.13 libcudart.so.12
      HINTS "$ENV{CUDA_HOME}" /usr/local/cuda PATH_SUFFIXES lib64 lib)
    mark_as_advanced(TESSERA_CUPTI_LIBRARY TESSERA_CUDART_LIBRARY)
    if(TESSERA_CUPTI_LIBRARY AND TESSERA_CUDART_LIBRARY)
      get_filename_component(_cupti_dir "${TESSERA_CUPTI_LIBRARY}" DIRECTORY)
      get_filename_component(_cudart_dir "${TESSERA_CUDART_LIBRARY}" DIRECTORY)
      # DT_RPATH (old tags), because only that applies to indirect dependencies.
      set_property(TARGET tessera::torch APPEND PROPERTY INTERFACE_LINK_OPTIONS
        "LINKER:--disable-new-dtags,-rpath,${_cupti_dir},-rpath,${_cudart_dir}")
    endif()
  endif()
  set_property(TARGET tessera::torch APPEND PROPERTY INTERFACE_LINK_OPTIONS
    "LINKER:--unresolved-symbols=ignore-in-shared-libs")
endif()

if(TesseraTorch_FOUND AND (TESSERA_CUDA OR TESSERA_TEST_GPU) AND NOT TARGET tessera::torch_cuda)
  find_library(TESSERA_TORCH_CUDA_LIBRARY torch_cuda HINTS "${TESSERA_TORCH_INCLUDE_DIR}/../lib" NO_DEFAULT_PATH REQUIRED)
  find_library(TESSERA_C10_CUDA_LIBRARY c10_cuda HINTS "${TESSERA_TORCH_INCLUDE_DIR}/../lib" NO_DEFAULT_PATH REQUIRED)
  find_path(TESSERA_CUDA_INCLUDE_DIR cuda_runtime_api.h
    HINTS "$ENV{CUDA_HOME}" /usr/local/cuda PATH_SUFFIXES include REQUIRED)
  find_path(TESSERA_NCCL_INCLUDE_DIR nccl.h
    HINTS "$ENV{NCCL_HOME}" "$ENV{CUDA_HOME}" /usr/local/cuda PATH_SUFFIXES include REQUIRED)
  find_library(TESSERA_CUDART_LIBRARY NAMES cudart libcudart.so.13 libcudart.so.12
    HINTS "$ENV{CUDA_HOME}" /usr/local/cuda PATH_SUFFIXES lib64 lib REQUIRED)
  mark_as_advanced(TESSERA_TORCH_CUDA_LIBRARY TESSERA_C10_CUDA_LIBRARY TESSERA_CUDA_INCLUDE_DIR TESSERA_NCCL_INCLUDE_DIR
    TESSERA_CUDART_LIBRARY)
  add_library(tessera::c10_cuda SHARED IMPORTED GLOBAL)
  set_target_properties(tessera::c10_cuda PROPERTIES IMPORTED_LOCATION "${TESSERA_C10_CUDA_LIBRARY}" IMPORTED_NO_SONAME ON)
  add_library(tessera::torch_cuda SHARED IMPORTED GLOBAL)
  set_target_properties(tessera::torch_cuda PROPERTIES
    IMPORTED_LOCATION "${TESSERA_TORCH_CUDA_LIBRARY}" IMPORTED_NO_SONAME ON
    INTERFACE_LINK_LIBRARIES "tessera::torch;tessera::c10_cuda;${TESSERA_CUDART_LIBRARY}"
    # Links libtorch_cuda into every program, even if none of its symbols is used: loading it registers the device.
    INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed"
    INTERFACE_INCLUDE_DIRECTORIES "${TESSERA_CUDA_INCLUDE_DIR};${TESSERA_NCCL_INCLUDE_DIR}"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${TESSERA_CUDA_INCLUDE_DIR};${TESSERA_NCCL_INCLUDE_DIR}")
endif()
