# `cmake --install` gives <prefix>/include/tessera, the libraries, and a package for
# find_package(tessera), which finds libtorch again by the same rules.
include(CMakePackageConfigHelpers)

install(TARGETS tessera ${TESSERA_LIBRARIES} EXPORT tessera-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
foreach(_folder ${TESSERA_FOLDERS})
  install(DIRECTORY ${_folder} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera FILES_MATCHING PATTERN "*.h")
endforeach()
install(FILES tessera.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera)

if(TESSERA_BUILD_TOOLS)
  install(TARGETS tessera_command DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(EXPORT tessera-targets NAMESPACE tessera:: DESTINATION ${_package})
configure_package_config_file(cmake/tessera-config.cmake.in "${PROJECT_BINARY_DIR}/tessera-config.cmake"
  INSTALL_DESTINATION ${_package})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/tessera-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES cmake/FindTesseraTorch.cmake "${PROJECT_BINARY_DIR}/tessera-config.cmake"
  "${PROJECT_BINARY_DIR}/tessera-config-version.cmake" DESTINATION ${_package})
