# Fails if the compiler links its C++ library statically. libtorch uses the shared one, and a program with both frees
# memory of the other: for example, c10d's ProcessGroupNCCL ends in `free(): invalid pointer`.
if(NOT DEFINED TESSERA_SHARED_RUNTIME)
  set(_tessera_program "${CMAKE_BINARY_DIR}/CMakeFiles/tessera_shared_runtime")
  try_compile(_tessera_links
    SOURCE_FROM_CONTENT program.cpp "#include <iostream>\nint main() { std::cout << 1; }\n"
    NO_CACHE COPY_FILE "${_tessera_program}")
  if(_tessera_links)
    file(STRINGS "${_tessera_program}" _tessera_shared REGEX "^lib(std)?c\\+\\+[^ ]*\\.so")
    if(NOT _tessera_shared)
      message(FATAL_ERROR "the compiler links its C++ library statically, and libtorch has the shared one: "
        "${CMAKE_CXX_COMPILER} finds no libstdc++.so, or is told -static-libstdc++. "
        "Use another compiler, or tell it where one lies: LDFLAGS=-L<folder with libstdc++.so>")
    endif()
    set(TESSERA_SHARED_RUNTIME ON CACHE INTERNAL "the compiler links its C++ library as libtorch does")
  endif()
endif()
