# `cmake --install BUILD --component cpp`: the rooms that other projects link, with their headers,
# a package for find_package(modicum) and one for pkg-config (docs/reference/cpp.md). The
# third-party libraries are those of the machine.

include(CMakePackageConfigHelpers)

get_property(rooms GLOBAL PROPERTY MODICUM_ROOMS)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/modicum)
list(TRANSFORM rooms PREPEND modicum_ OUTPUT_VARIABLE libraries)
install(TARGETS ${libraries} modicum_flags EXPORT modicum COMPONENT cpp
        DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT modicum NAMESPACE modicum:: FILE modicumTargets.cmake COMPONENT cpp
        DESTINATION ${package})
foreach(room ${rooms})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/modicum/${room} COMPONENT cpp
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/modicum
          FILES_MATCHING PATTERN *.h PATTERN *_double*.h EXCLUDE PATTERN configs EXCLUDE)
endforeach()

list(JOIN rooms ", " room_names)
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/modicumConfig.cmake @ONLY CONTENT [[
include(CMakeFindDependencyMacro)
foreach(dependency Threads fmt simdjson hwy)
  find_dependency(${dependency})
endforeach()
include(${CMAKE_CURRENT_LIST_DIR}/import.cmake)
modicum_import(re2::re2 re2/re2.h re2 OPTIONAL)
modicum_import(nettle::nettle nettle/sha2.h nettle OPTIONAL)
foreach(dependency re2 nettle)
  if(NOT TARGET ${dependency}::${dependency})
    set(modicum_FOUND FALSE)
    set(modicum_NOT_FOUND_MESSAGE "modicum needs the library and the headers of ${dependency}.")
    return()
  endif()
endforeach()
include(${CMAKE_CURRENT_LIST_DIR}/modicumTargets.cmake)
set(modicum_NOT_FOUND_MESSAGE "")
foreach(component ${modicum_FIND_COMPONENTS})
  if(TARGET modicum::${component})
    set(modicum_${component}_FOUND TRUE)
  elseif(modicum_FIND_REQUIRED_${component})
    set(modicum_FOUND FALSE)
    string(APPEND modicum_NOT_FOUND_MESSAGE "expected a component of @room_names@, "
                                            "got ${component}. ")
  endif()
endforeach()
]])
write_basic_package_version_file(${PROJECT_BINARY_DIR}/modicumConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/modicumConfig.cmake cmake/import.cmake
              ${PROJECT_BINARY_DIR}/modicumConfigVersion.cmake COMPONENT cpp DESTINATION ${package})

# A room comes after those that it needs, so the linker wants the opposite order.
list(REVERSE libraries)
list(JOIN libraries " -l" libraries)
file(RELATIVE_PATH prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/modicum.pc @ONLY CONTENT [[
prefix=${pcfiledir}/@prefix@
Name: modicum
Description: @CMAKE_PROJECT_DESCRIPTION@
Version: @PROJECT_VERSION@
Requires: fmt simdjson libhwy re2 nettle
Cflags: -std=c++20 -I${prefix}/@CMAKE_INSTALL_INCLUDEDIR@
Libs: -L${prefix}/@CMAKE_INSTALL_LIBDIR@ -l@libraries@ -pthread
]])
install(FILES ${PROJECT_BINARY_DIR}/modicum.pc COMPONENT cpp
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
