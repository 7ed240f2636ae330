# Builds the consumer project with Tessera as its subdirectory, and runs it:
#
#   cmake -DTESSERA_SOURCE_DIR=... -DTESSERA_BINARY_DIR=... -DWORK_DIR=... -DGENERATOR=... -DCXX_COMPILER=...
#         -DTORCH_DIR=... [-DLAUNCHER=...] -P run.cmake
#
# WORK_DIR is kept, so that a second run compiles only changes.
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(build "${WORK_DIR}/add_subdirectory")
# No build type and no flags, like a first-time user; the flags that the library needs must be inherited.
set(arguments -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" --log-level=WARNING --no-warn-unused-cli)
if(LAUNCHER)  # ccache, if there is one; shares objects of other clones
  list(APPEND arguments "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}")
  set(ENV{CCACHE_BASEDIR} "${TESSERA_SOURCE_DIR}")
  set(ENV{CCACHE_NOHASHDIR} 1)
endif()

list(APPEND arguments "-DTESSERA_SOURCE_DIR=${TESSERA_SOURCE_DIR}" "-DCMAKE_PREFIX_PATH=${TORCH_DIR}"
  # No precompiled header: it would cost more than it saves, and hide missing includes.
  -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON
  # Dependencies of Tessera's own tests, benchmarks and examples must not be required.
  -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON -DCMAKE_DISABLE_FIND_PACKAGE_benchmark=ON
  -DCMAKE_DISABLE_FIND_PACKAGE_Boost=ON)

# Building all libraries again would take minutes. This configures all targets, and builds one with a program that links
# only that. The program that uses all is compiled, and linked below with the existing libraries.
run(${CMAKE_COMMAND} -S "${CMAKE_CURRENT_LIST_DIR}" -B "${build}" ${arguments})
run(${CMAKE_COMMAND} --build "${build}" --parallel 2 --target peak)
run("${build}/peak")

if(GENERATOR STREQUAL "Ninja")
  execute_process(COMMAND ninja -C "${build}" -t commands tessera_base OUTPUT_VARIABLE compiled
    COMMAND_ERROR_IS_FATAL ANY)
  if(NOT compiled MATCHES " -O3 ")
    message(FATAL_ERROR "in a project without a build type Tessera's own files are not optimised:\n${compiled}")
  endif()
  set(linked "${WORK_DIR}/linked") # mirrors the build tree, but with the libraries of Tessera's own build
  file(REMOVE_RECURSE "${linked}")
  file(MAKE_DIRECTORY "${linked}")
  run(${CMAKE_COMMAND} --build "${build}" --target CMakeFiles/consumer.dir/main.cpp.o)
  file(CREATE_LINK "${build}/CMakeFiles" "${linked}/CMakeFiles" SYMBOLIC)
  file(CREATE_LINK "${TESSERA_BINARY_DIR}" "${linked}/tessera" SYMBOLIC)
  execute_process(COMMAND ninja -C "${build}" -t commands consumer COMMAND tail -n 1 OUTPUT_VARIABLE link
    COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND sh -c "${link}" WORKING_DIRECTORY "${linked}" COMMAND_ERROR_IS_FATAL ANY)
  run("${linked}/consumer")
endif()
