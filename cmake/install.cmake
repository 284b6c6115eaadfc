# What `cmake --install` puts down: headers, both libraries, the program with its man page and completion, folio.pc
# and the package that find_package(folio) reads.
include(CMakePackageConfigHelpers)

set(FOLIO_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/folio)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/folio DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h")
install(TARGETS folio_shared folio_static EXPORT folioTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(FOLIO_BUILD_CLI)
  install(TARGETS folio_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
if(FOLIO_HAS_PAGES)
  install(FILES ${FOLIO_PAGES}/folio.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  install(FILES ${FOLIO_PAGES}/folio DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
  install(FILES ${FOLIO_PAGES}/_folio DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
  install(FILES ${FOLIO_PAGES}/folio.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

install(EXPORT folioTargets NAMESPACE folio:: DESTINATION ${FOLIO_PACKAGE_DIR})
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/folio-config.cmake.in ${PROJECT_BINARY_DIR}/folio-config.cmake
  INSTALL_DESTINATION ${FOLIO_PACKAGE_DIR})
# The header only grows: a newer 0.x serves whoever asked for an older one.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/folio-config-version.cmake
                                 COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/folio-config.cmake
              ${PROJECT_BINARY_DIR}/folio-config-version.cmake
        DESTINATION ${FOLIO_PACKAGE_DIR})

# folio.pc finds its prefix from its own place, so that an installed tree can be moved.
file(RELATIVE_PATH FOLIO_PC_TO_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" FOLIO_PC_TO_PREFIX "${FOLIO_PC_TO_PREFIX}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/folio.pc.in ${PROJECT_BINARY_DIR}/folio.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/folio.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
