# RE2 as Debian packs it, which brings no CMake package: the imported target re2::re2, with the
# soname that the wheel bundles it under.

find_path(RE2_INCLUDE_DIR re2/re2.h REQUIRED)
find_library(RE2_LIBRARY re2 REQUIRED)
file(REAL_PATH ${RE2_LIBRARY} re2_file)
execute_process(
  COMMAND ${CMAKE_OBJDUMP} -p ${re2_file}
  OUTPUT_VARIABLE re2_headers COMMAND_ERROR_IS_FATAL ANY)
if(NOT re2_headers MATCHES "SONAME +([^ \n]+)")
  message(FATAL_ERROR "${re2_file} has no soname")
endif()
add_library(re2::re2 SHARED IMPORTED)
set_target_properties(
  re2::re2 PROPERTIES IMPORTED_LOCATION ${re2_file} IMPORTED_SONAME ${CMAKE_MATCH_1}
                      INTERFACE_INCLUDE_DIRECTORIES ${RE2_INCLUDE_DIR})
