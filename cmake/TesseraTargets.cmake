# tessera_add_library(<name> SOURCES ... LINKS ...): a library, compiled as all are, with a precompiled header for
# torch; and the same for the programs of tests, bench and examples.

include(GNUInstallDirs)

find_program(TESSERA_CCACHE ccache)
mark_as_advanced(TESSERA_CCACHE)
if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER AND PROJECT_IS_TOP_LEVEL)
  # ccache looks into precompiled headers only when told that their time stamps do not matter, and knows them
  # by what tessera_describe_pch() writes beside them: no two are the same bytes. With paths relative to the
  # tree, one clone of it profits from what another has compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_PCH_EXTSUM=1
    CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${TESSERA_CCACHE})
endif()

add_library(tessera_options INTERFACE)
target_compile_features(tessera_options INTERFACE cxx_std_20)
target_compile_options(tessera_options INTERFACE $<BUILD_INTERFACE:-Wall -Wextra -Wpedantic -Wshadow
  -Wno-missing-field-initializers $<$<NOT:$<BOOL:${CMAKE_DISABLE_PRECOMPILE_HEADERS}>>:-Winvalid-pch -fpch-preprocess>>
  # Everywhere, programs too: a precompiled header serves one setting only.
  # Messages name files (__FILE__) from the tree's root: what one clone has compiled then serves others by ccache.
  $<BUILD_INTERFACE:-fPIC -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>
  # `cmake -B build` alone, of this or of a user's project, has no build type and would mean no optimisation.
  $<BUILD_INTERFACE:$<$<CONFIG:>:-O3>>)
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE
    $<BUILD_INTERFACE:-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    # gcc cannot follow what the sanitizers insert, and warns of libtorch's inline functions.
    -Wno-maybe-uninitialized>)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()
if(TESSERA_SANITIZE_LIBRARIES)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE_LIBRARIES})
endif()

# torch's headers cost 10 to 40 s in each file that includes them: compile them once and lend them to
# all. Two sets, because GCC instantiates the templates that a precompiled header uses once more in
# each file: 3 s for modules and autograd, which is what the libraries see of torch, 8 s for torch/torch.h.
# With TESSERA_UNITY a target's files are one: a third of the time for all of a library's. NO_PCH: then without a
# precompiled header. For what includes little of torch, since to load one takes 3 s; and for a program that `make demo`
# builds alone, since to make one takes longer than to read torch/torch.h once.
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
    add_library(tessera_pch_${headers} OBJECT "${PROJECT_SOURCE_DIR}/cmake/pch.cpp")
    target_link_libraries(tessera_pch_${headers} PRIVATE tessera_options tessera::torch)
    tessera_compile_as(tessera_pch_${headers} ${headers})
    target_precompile_headers(tessera_pch_${headers} PRIVATE ${_${headers}_see})
    tessera_describe_pch(tessera_pch_${headers} "${_${headers}_see}")
  endif()
  target_precompile_headers(${target} REUSE_FROM tessera_pch_${headers})
endfunction()

# Beside the precompiled header, the sum by which ccache tells it from others: of what goes into it that ccache
# does not see itself. It does see the compiler and its options.
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

# Programs leave the work to libtorch and to our libraries: -O1 halves the time that they take to compile,
# and without UndefinedBehaviorSanitizer it is a third less: most of what a test compiles is inline functions
# of torch's.
function(tessera_compile_as target headers)
  if(headers STREQUAL "programs")
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  elseif(TESSERA_SANITIZE_LIBRARIES)
    # Without the checks at each access to a member, which take a quarter of the time and which AddressSanitizer
    # makes in its way; the fuzzer has them all.
    target_compile_options(${target} PRIVATE -fsanitize=${TESSERA_SANITIZE_LIBRARIES} -fno-sanitize=null,object-size,vptr)
  endif()
endfunction()

# An include path is a path in the repository: "core/comm/communicator.h", or <tessera/fsdp.h> in include/.
function(tessera_add_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINKS")
  add_library(tessera_${name} ${arg_SOURCES})
  add_library(tessera::${name} ALIAS tessera_${name})  # as find_package(tessera) names it
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
