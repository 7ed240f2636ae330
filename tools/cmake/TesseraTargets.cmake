# tessera_add_library(<name> SOURCES ... LINKS ...) adds a library with common options and a precompiled header for
# torch; tessera_add_program() does so for programs of tests, bench and examples.

include(GNUInstallDirs)

find_program(TESSERA_CCACHE ccache)
mark_as_advanced(TESSERA_CCACHE)
if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER AND PROJECT_IS_TOP_LEVEL)
  # ccache uses precompiled headers only if time stamps are ignored, and identifies them by the sum that
  # tessera_describe_pch() writes, because their bytes always differ. Relative paths let clones of the tree share
  # results.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_PCH_EXTSUM=1
    CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${TESSERA_CCACHE})
endif()

add_library(tessera_options INTERFACE)
target_compile_features(tessera_options INTERFACE cxx_std_20)
target_compile_options(tessera_options INTERFACE $<BUILD_INTERFACE:-Wall -Wextra -Wpedantic -Wshadow
  -Wno-missing-field-initializers $<$<NOT:$<BOOL:${CMAKE_DISABLE_PRECOMPILE_HEADERS}>>:-Winvalid-pch -fpch-preprocess>>
  # For all targets, programs included: a precompiled header fits one set of options only. __FILE__ is relative to the
  # tree's root, so clones share results in ccache.
  $<BUILD_INTERFACE:-fPIC -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>
  # gcc would collect garbage from 128 MB on, which takes a tenth of a large file's time: not below 1.5 GB.
  $<BUILD_INTERFACE:$<$<CXX_COMPILER_ID:GNU>:SHELL:--param ggc-min-heapsize=1500000>>
  # Plain `cmake -B build`, of this or of a user's project, has no build type and would not optimise.
  $<BUILD_INTERFACE:$<$<CONFIG:>:-O3>>)
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE
    $<BUILD_INTERFACE:-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    # gcc cannot analyse instrumented code, and warns of libtorch's inline functions.
    -Wno-maybe-uninitialized>)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()
if(TESSERA_SANITIZE_LIBRARIES)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE_LIBRARIES})
endif()

# torch's headers cost 10 to 40 s in each file, so all targets reuse precompiled ones. There are two sets, because GCC
# instantiates a precompiled header's templates again in each file: 3 s for modules and autograd, which the libraries
# use, 8 s for torch/torch.h. With TESSERA_UNITY a target is one file, which takes a third of the time. NO_PCH disables
# the precompiled header: loading one takes 3 s, too long for files that include little of torch. Creating one takes
# longer than compiling the program that `make demo` builds alone.
function(tessera_compile_fast target headers)
  cmake_parse_arguments(PARSE_ARGV 2 arg "NO_PCH" "" "")
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${TESSERA_UNITY} UNITY_BUILD_BATCH_SIZE 0)
  tessera_compile_as(${target} ${headers})
  if(arg_NO_PCH AND TESSERA_UNITY)
    return()
  endif()
  if(NOT TARGET tessera_pch_${headers})
    set(_libraries_see "<torch/nn/module.h>" "<torch/csrc/autograd/engine.h>")
    set(_programs_see "<torch/torch.h>")
    add_library(tessera_pch_${headers} OBJECT "${PROJECT_SOURCE_DIR}/tools/cmake/pch.cpp")
    target_link_libraries(tessera_pch_${headers} PRIVATE tessera_options tessera::torch)
    tessera_compile_as(tessera_pch_${headers} ${headers})
    target_precompile_headers(tessera_pch_${headers} PRIVATE ${_${headers}_see})
    tessera_describe_pch(tessera_pch_${headers} "${_${headers}_see}")
  endif()
  target_precompile_headers(${target} REUSE_FROM tessera_pch_${headers})
endfunction()

# Writes the sum that identifies the precompiled header to ccache: of the inputs that ccache does not see. It sees the
# compiler and its options.
function(tessera_describe_pch target headers)
  set(_sum "${headers}")
  foreach(_file torch/headeronly/version.h torch/version.h c10/cuda/impl/cuda_cmake_macros.h c10/macros/cmake_macros.h
          torch/headeronly/macros/cmake_macros.h ATen/Config.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${TESSERA_TORCH_INCLUDE_DIR}/${_file}")
      file(SHA256 "${TESSERA_TORCH_INCLUDE_DIR}/${_file}" _hash)
      string(APPEND _sum " ${_hash}")
    endif()
  endforeach()
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" --version OUTPUT_VARIABLE _compiler)
  string(SHA256 _sum "${_sum} ${_compiler}")
  get_target_property(_folder ${target} BINARY_DIR)
  file(CONFIGURE OUTPUT "${_folder}/CMakeFiles/${target}.dir/cmake_pch.hxx.gch.sum" CONTENT "${_sum}\n")
endfunction()

# Programs do their work in libtorch and our libraries: -O1 halves their compile time, and omitting
# UndefinedBehaviorSanitizer saves another third, because most of a test's code is torch's inline functions.
function(tessera_compile_as target headers)
  if(headers STREQUAL "programs")
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  elseif(TESSERA_SANITIZE_LIBRARIES)
    # Omits the checks of each member access, which take a quarter of the time and which AddressSanitizer covers; the
    # fuzzer has them all.
    target_compile_options(${target} PRIVATE -fsanitize=${TESSERA_SANITIZE_LIBRARIES} -fno-sanitize=null,object-size,vptr)
  endif()
endfunction()

# An include path is a path in the repository: "core/comm/communicator.h", or <tessera/fsdp.h> in include/.
function(tessera_add_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINKS")
  add_library(tessera_${name} ${arg_SOURCES})
  add_library(tessera::${name} ALIAS tessera_${name})  # its name in find_package(tessera)
  target_link_libraries(tessera_${name} PUBLIC tessera::torch ${arg_LINKS} PRIVATE $<BUILD_INTERFACE:tessera_options>)
  target_compile_features(tessera_${name} PUBLIC cxx_std_20)
  target_include_directories(tessera_${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR})
  set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name})
  tessera_compile_fast(tessera_${name} libraries)
endfunction()

# tessera_add_program(<name> SOURCES ... LINKS ...): an executable of tests, bench or examples.
function(tessera_add_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINKS")
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE tessera::tessera tessera_options ${arg_LINKS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  tessera_compile_fast(${name} programs)
endfunction()
