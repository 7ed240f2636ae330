# Builds the consumer project with Tessera as its subdirectory, and runs it:
#
#   cmake -DTESSERA_SOURCE_DIR=... -DTESSERA_BINARY_DIR=... -DWORK_DIR=... -DGENERATOR=... -DCXX_COMPILER=...
#         -DTORCH_DIR=... [-DLAUNCHER=...] -P run.cmake
#
# WORK_DIR is kept, so that a second run compiles only what has changed.
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(build "${WORK_DIR}/add_subdirectory")
# Neither a build type nor flags, as a first-time user has it; the library's own need must get through.
set(arguments -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" --log-level=WARNING --no-warn-unused-cli)
if(LAUNCHER) # ccache, if there is one; what another clone has compiled serves here
  list(APPEND arguments "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}")
  set(ENV{CCACHE_BASEDIR} "${TESSERA_SOURCE_DIR}")
  set(ENV{CCACHE_NOHASHDIR} 1)
endif()

list(APPEND arguments "-DTESSERA_SOURCE_DIR=${TESSERA_SOURCE_DIR}" "-DCMAKE_PREFIX_PATH=${TORCH_DIR}"
  # Nor a precompiled header: it would cost more than it saves here, and without it a library has to include
  # what it uses.
  -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON
  # What only Tessera's own tests, benchmarks and examples need must not be asked for.
  -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON -DCMAKE_DISABLE_FIND_PACKAGE_benchmark=ON
  -DCMAKE_DISABLE_FIND_PACKAGE_Boost=ON)

# All libraries once more would take minutes: every target of theirs is configured, one is built, and a program that
# takes it alone. The program that takes all is compiled, and linked below with the libraries that are there.
run(${CMAKE_COMMAND} -S "${CMAKE_CURRENT_LIST_DIR}" -B "${build}" ${arguments})
run(${CMAKE_COMMAND} --build "${build}" --parallel 2 --target peak)
run("${build}/peak")

if(GENERATOR STREQUAL "Ninja")
  execute_process(COMMAND ninja -C "${build}" -t commands tessera_base OUTPUT_VARIABLE compiled
    COMMAND_ERROR_IS_FATAL ANY)
  if(NOT compiled MATCHES " -O3 ")
    message(FATAL_ERROR "in a project without a build type Tessera's own files are not optimised:\n${compiled}")
  endif()
  set(linked "${WORK_DIR}/linked") # as the build tree, with Tessera's own libraries in the place of this project's
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
