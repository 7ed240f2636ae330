# `cmake --install` has three components: `development` (<prefix>/include/tessera, the libraries, and a package for
# find_package(tessera), which finds libtorch by the same rules), `tools` (the command `tessera`, and the Python programs
# for exported models and for checkpoints of other programs) and `documentation` (with the examples). cpack packages all
# three as a .deb and a .tar.gz.
include(CMakePackageConfigHelpers)

install(TARGETS tessera ${TESSERA_LIBRARIES} EXPORT tessera-targets COMPONENT development
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)

if(TESSERA_BUILD_TOOLS)
  # libtorch is not installed; -DCMAKE_INSTALL_RPATH= sets another place.
  if(NOT CMAKE_INSTALL_RPATH)
    set_target_properties(tessera_command PROPERTIES INSTALL_RPATH "${TesseraTorch_PREFIX}/lib")
  endif()
  install(TARGETS tessera_command COMPONENT tools DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# The Python programs, which import modules from their own folder.
set(_python "${CMAKE_INSTALL_DATADIR}/tessera/tools")
install(PROGRAMS tools/export_model.py tools/tokenize_text.py tools/tessera-convert DESTINATION ${_python}
  COMPONENT tools)
install(DIRECTORY tools/convert DESTINATION ${_python} COMPONENT tools FILES_MATCHING PATTERN "*.py")

# The folders are those of the source tree, so that links between pages lead to files.
install(DIRECTORY docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/docs COMPONENT documentation
  FILES_MATCHING PATTERN "*.md" PATTERN "*.svg" PATTERN "reference" EXCLUDE)
install(FILES README.md CONTRIBUTING.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT documentation)
install(FILES checkpoint/format/FORMAT.md DESTINATION ${CMAKE_INSTALL_DOCDIR}/checkpoint/format COMPONENT documentation)
install(FILES tools/packaging/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR}/tools/packaging COMPONENT documentation)
install(DIRECTORY tools/packaging/kubernetes DESTINATION ${CMAKE_INSTALL_DOCDIR}/tools/packaging COMPONENT documentation)
install(DIRECTORY examples DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT documentation
  PATTERN "CMakeLists.txt" EXCLUDE PATTERN "installed.cmake" EXCLUDE)
install(FILES examples/installed.cmake DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples RENAME CMakeLists.txt
  COMPONENT documentation)
# The API reference, if `make docs` was run.
install(DIRECTORY build/docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/reference COMPONENT documentation OPTIONAL)

set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(EXPORT tessera-targets NAMESPACE tessera:: DESTINATION ${_package} COMPONENT development)
configure_package_config_file(tools/cmake/tessera-config.cmake.in "${PROJECT_BINARY_DIR}/tessera-config.cmake"
  INSTALL_DESTINATION ${_package})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/tessera-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES tools/cmake/FindTesseraTorch.cmake tools/cmake/TesseraSharedRuntime.cmake "${PROJECT_BINARY_DIR}/tessera-config.cmake"
  "${PROJECT_BINARY_DIR}/tessera-config-version.cmake" DESTINATION ${_package} COMPONENT development)

if(PROJECT_IS_TOP_LEVEL)
  set(CPACK_GENERATOR DEB TGZ)
  set(CPACK_PACKAGE_NAME tessera)
  set(CPACK_PACKAGE_CONTACT "Tessera's maintainers <maintainers@tessera.invalid>")
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Sharded data parallel training for libtorch (ZeRO stages 1 to 3)")
  set(CPACK_PACKAGE_DIRECTORY "${PROJECT_BINARY_DIR}/packages")
  set(CPACK_PACKAGE_FILE_NAME "tessera-${PROJECT_VERSION}-libtorch-${TesseraTorch_VERSION}-${CMAKE_SYSTEM_PROCESSOR}")
  set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
  set(CPACK_STRIP_FILES ON)
  set(CPACK_MONOLITHIC_INSTALL ON)
  set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
  # No Debian package provides this libtorch, so dpkg-shlibdeps fails.
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libstdc++6, libboost-program-options1.74.0, nlohmann-json3-dev")
  if(TESSERA_CURL)
    string(APPEND CPACK_DEBIAN_PACKAGE_DEPENDS ", libcurl4-openssl-dev")
  endif()
  include(CPack)
endif()
