# tessera_add_library(<folder> SOURCES ... LINKS ...): one target a folder, compiled alike, with a
# precompiled header for torch; and the same for the programs of tests, bench and examples.

include(GNUInstallDirs)

find_program(TESSERA_CCACHE ccache)
mark_as_advanced(TESSERA_CCACHE)
if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER AND PROJECT_IS_TOP_LEVEL)
  # ccache looks into precompiled headers only when told that their time stamps do not matter; and
  # with paths relative to the tree, one clone of it profits from what another has compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${TESSERA_CCACHE})
endif()

# Headers are included as "tessera/<folder>/<name>.h" in the tree and once installed: here the
# build tree holds a link for each folder.
set(TESSERA_INCLUDE_DIR "${PROJECT_BINARY_DIR}/include")
file(MAKE_DIRECTORY "${TESSERA_INCLUDE_DIR}/tessera")
foreach(_entry comm flat oss sdp fsdp optim zero checkpoint tessera.h)
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/${_entry}" "${TESSERA_INCLUDE_DIR}/tessera/${_entry}" SYMBOLIC)
endforeach()

add_library(tessera_options INTERFACE)
target_compile_features(tessera_options INTERFACE cxx_std_20)
target_compile_options(tessera_options INTERFACE $<BUILD_INTERFACE:-Wall -Wextra -Wpedantic -Wshadow
  -Wno-missing-field-initializers -Winvalid-pch -fpch-preprocess>
  # Everywhere, programs too: a precompiled header serves one setting only.
  $<BUILD_INTERFACE:-fPIC>)
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE
    $<BUILD_INTERFACE:-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    # gcc cannot follow what the sanitizers insert, and warns of libtorch's inline functions.
    -Wno-maybe-uninitialized>)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()

# torch/torch.h costs 20 s in each file that includes it: compile it once and lend it to all.
function(tessera_use_pch target)
  if(NOT TARGET tessera_pch)
    add_library(tessera_pch OBJECT "${PROJECT_SOURCE_DIR}/cmake/pch.cpp")
    target_link_libraries(tessera_pch PRIVATE tessera_options tessera::torch)
    target_precompile_headers(tessera_pch PRIVATE "<torch/torch.h>")
  endif()
  target_precompile_headers(${target} REUSE_FROM tessera_pch)
endfunction()

function(tessera_add_library folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINKS")
  add_library(tessera_${folder} ${arg_SOURCES})
  target_link_libraries(tessera_${folder} PUBLIC tessera::torch ${arg_LINKS} PRIVATE $<BUILD_INTERFACE:tessera_options>)
  target_compile_features(tessera_${folder} PUBLIC cxx_std_20)
  target_include_directories(tessera_${folder} PUBLIC
    $<BUILD_INTERFACE:${TESSERA_INCLUDE_DIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  set_target_properties(tessera_${folder} PROPERTIES EXPORT_NAME ${folder})
  tessera_use_pch(tessera_${folder})
endfunction()

# tessera_add_program(<name> SOURCES ... LINKS ...): an executable of tests, bench or examples.
function(tessera_add_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINKS")
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE tessera::tessera tessera_options ${arg_LINKS})
  tessera_use_pch(${name})
endfunction()
