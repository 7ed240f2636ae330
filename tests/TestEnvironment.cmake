# Sets TESSERA_TEST_ENVIRONMENT, the environment of tests: settings of the sanitizers, with suppressions for foreign
# code. Empty in a plain build.
set(TESSERA_TEST_ENVIRONMENT "")
set(_suppressions "${PROJECT_SOURCE_DIR}/tools/cmake/sanitizers")
if(TESSERA_SANITIZE MATCHES "address")
  # A failed allocation must throw, as without the sanitizer: tests catch libtorch's exception. Tests start many threads.
  # Each takes memory for its frames, by default frames of up to 1 MiB: with 64 KiB the kernel works half as long.
  set(_of_frames "detect_stack_use_after_return=1:max_uar_stack_size_log=16:malloc_context_size=12")
  list(APPEND TESSERA_TEST_ENVIRONMENT
    "ASAN_OPTIONS=suppressions=${_suppressions}/asan.supp:${_of_frames}:allocator_may_return_null=1"
    "LSAN_OPTIONS=suppressions=${_suppressions}/lsan.supp:print_suppressions=0")
endif()
if("${TESSERA_SANITIZE},${TESSERA_SANITIZE_LIBRARIES}" MATCHES "undefined")
  list(APPEND TESSERA_TEST_ENVIRONMENT "UBSAN_OPTIONS=suppressions=${_suppressions}/ubsan.supp:print_stacktrace=1")
endif()
if(TESSERA_SANITIZE MATCHES "thread")
  # One OpenMP thread: libgomp is not instrumented, so its barriers would look like races. Tests fork ranks, and these
  # start threads, while the clock's thread runs.
  set(_of_races "history_size=7:second_deadlock_stack=1:die_after_fork=0")
  list(APPEND TESSERA_TEST_ENVIRONMENT
    "TSAN_OPTIONS=suppressions=${_suppressions}/tsan.supp:${_of_races}:allocator_may_return_null=1"
    OMP_NUM_THREADS=1)
endif()
if(TESSERA_SANITIZE)
  list(APPEND TESSERA_TEST_ENVIRONMENT TESSERA_TEST_TREES=2)
endif()
