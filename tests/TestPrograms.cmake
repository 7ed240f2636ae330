# tessera_test_program(<program> [LINKS ...] [FILES <n>] [UNFILLED]): a GoogleTest executable for all tests of a folder.
# Most of a test's compile time is torch/torch.h; with TESSERA_UNITY, a program compiles it once (with FILES, in n files
# in parallel). Unwritten memory is NaN, unless UNFILLED.
#
# tessera_add_test(<name> PROGRAM <program> SOURCES ... [PROCESSES] [RACES] [LABEL <more>] [TIMEOUT <seconds>]): one of
# ctest's tests, which runs these files' part of a program. It has the label "threads" (one process, ranks are threads)
# or, with PROCESSES, "processes". RACES adds the label "races": these tests cover all state that threads share, and
# .ci/run runs them with ThreadSanitizer. The target race_tests builds them; tessera_tests builds all.
#
# A file's suites are found in its text. The test <program>_is_all_run fails if ctest runs a test of the program never
# or twice.
add_custom_target(race_tests)
add_custom_target(tessera_tests)

function(tessera_test_program program)
  cmake_parse_arguments(PARSE_ARGV 1 arg "UNFILLED" "FILES" "LINKS")
  tessera_add_program(${program} LINKS GTest::gtest_main ${arg_LINKS})
  if(NOT arg_UNFILLED)
    target_link_libraries(${program} PRIVATE $<TARGET_OBJECTS:tessera_unwritten_is_nan>)
  endif()
  target_include_directories(${program} PRIVATE "${PROJECT_SOURCE_DIR}")
  # Uses the precompiled header of -O1, and compiles a tenth faster. gcc then warns of an unread value in libtorch's
  # headers.
  target_compile_options(${program} PRIVATE $<$<CONFIG:Release>:-Og>
    $<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU>>:-Wno-maybe-uninitialized>)
  add_dependencies(tessera_tests ${program})
  if(arg_FILES)
    set_target_properties(${program} PROPERTIES TESSERA_FILES ${arg_FILES})
  endif()
  # Runs after the folder's list of tests is complete.
  cmake_language(EVAL CODE "cmake_language(DEFER CALL tessera_finish_test_program ${program})")
endfunction()

function(tessera_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "PROCESSES;RACES" "PROGRAM;TIMEOUT;LABEL" "SOURCES")
  target_sources(${arg_PROGRAM} PRIVATE ${arg_SOURCES})
  tessera_suites_of(_patterns ${arg_SOURCES})
  get_target_property(_others ${arg_PROGRAM} TESSERA_PATTERNS)
  foreach(_pattern ${_patterns})
    if(_pattern IN_LIST _others)
      message(FATAL_ERROR "the suite ${_pattern} of ${name} is in another test of ${arg_PROGRAM}: give it a name of its own")
    endif()
  endforeach()
  list(JOIN _patterns ":" _filter)
  set_property(TARGET ${arg_PROGRAM} APPEND PROPERTY TESSERA_PATTERNS ${_patterns})

  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  set(_labels threads)
  if(arg_PROCESSES)
    set(_labels processes)
  endif()
  if(arg_LABEL)
    list(APPEND _labels ${arg_LABEL})
  endif()
  if(arg_RACES)
    list(APPEND _labels races)
    add_dependencies(race_tests ${arg_PROGRAM})
  endif()
  add_test(NAME ${name} COMMAND ${arg_PROGRAM} --gtest_brief=1 --gtest_filter=${_filter})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "${TESSERA_TEST_ENVIRONMENT}"
    LABELS "${_labels}" COST ${arg_TIMEOUT})  # starts long tests first
endfunction()

# tessera_test_on_accelerator(<program> TESTS <pattern>... [EXCEPT <pattern>...]): runs tests of a program again as
# <program>_on_accelerator, whose on_ranks() gives ranks devices of the accelerator. Links the same objects into another
# executable, since libtorch behaves differently in a process with a device. EXCEPT lists tests for CPUs only.
function(tessera_test_on_accelerator program)
  if(NOT TESSERA_SIMULATES)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "TESTS;EXCEPT")
  set(_name ${program}_on_accelerator)
  add_executable(${_name} $<TARGET_OBJECTS:${program}>)
  get_target_property(_links ${program} LINK_LIBRARIES)
  target_link_libraries(${_name} PRIVATE ${_links} tessera_accelerator tessera_tests_on_devices)
  add_dependencies(tessera_tests ${_name})
  add_dependencies(accelerator_programs ${_name})
  list(JOIN arg_TESTS ":" _filter)
  list(JOIN arg_EXCEPT ":" _except)
  add_test(NAME ${_name} COMMAND ${_name} --gtest_brief=1 --gtest_filter=${_filter}-${_except})
  set_tests_properties(${_name} PROPERTIES TIMEOUT 300 LABELS "threads;accelerator" COST 300
    ENVIRONMENT "${TESSERA_TEST_ENVIRONMENT}")
endfunction()

# tessera_test_knows(<program> <NAME> <file or folder>): defines a macro for tests/support/built.h.
function(tessera_test_knows program name path)
  target_compile_definitions(${program} PRIVATE
    ${name}="$<PATH:RELATIVE_PATH,${path},$<TARGET_FILE_DIR:${program}>>")
endfunction()

# Returns the --gtest_filter patterns of these files' suites.
function(tessera_suites_of result)
  set(_patterns)
  foreach(_source ${ARGN})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_source}")
    file(STRINGS "${_source}" _lines REGEX "^(TEST|TEST_F|TEST_P|TYPED_TEST) *\\(")
    foreach(_line ${_lines})
      string(REGEX REPLACE "^([A-Z_]+) *\\( *([A-Za-z0-9_]+).*" "\\1;\\2" _parts "${_line}")
      list(POP_FRONT _parts _macro _suite)
      if(_macro STREQUAL "TEST_P")
        list(APPEND _patterns "*/${_suite}.*")
      elseif(_macro STREQUAL "TYPED_TEST")
        list(APPEND _patterns "${_suite}/*.*")
      else()
        list(APPEND _patterns "${_suite}.*")
      endif()
    endforeach()
  endforeach()
  if(NOT _patterns)
    message(FATAL_ERROR "there is no test in ${ARGN}")
  endif()
  list(REMOVE_DUPLICATES _patterns)
  set(${result} "${_patterns}" PARENT_SCOPE)
endfunction()

function(tessera_finish_test_program program)
  get_target_property(_patterns ${program} TESSERA_PATTERNS)
  get_target_property(_sources ${program} SOURCES)
  get_target_property(_files ${program} TESSERA_FILES)
  if(_files)
    list(LENGTH _sources _count)
    math(EXPR _size "(${_count} + ${_files} - 1) / ${_files}")
    set_target_properties(${program} PROPERTIES UNITY_BUILD_BATCH_SIZE ${_size})
  endif()
  list(JOIN _patterns ":" _filters)
  add_test(NAME ${program}_is_all_run COMMAND ${CMAKE_COMMAND} -DPROGRAM=$<TARGET_FILE:${program}>
    -DFILTERS=${_filters} -P ${PROJECT_SOURCE_DIR}/tests/all_are_run.cmake)
  set_tests_properties(${program}_is_all_run PROPERTIES TIMEOUT 60 LABELS processes
    ENVIRONMENT "${TESSERA_TEST_ENVIRONMENT}")
endfunction()
