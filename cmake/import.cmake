# modicum_import(TARGET HEADER LIBRARY [OPTIONAL]): an imported target for a Debian library without
# a CMake package. If it is not there, CMake fails; with OPTIONAL there is no target.
# cmake/python.cmake installs the library into the wheel under its IMPORTED_SONAME.
function(modicum_import target header library)
  if(TARGET ${target})
    return()
  endif()
  string(MAKE_C_IDENTIFIER ${library} id)
  set(required REQUIRED)
  if(OPTIONAL IN_LIST ARGN)
    set(required "")
  endif()
  find_path(${id}_INCLUDE_DIR ${header} ${required})
  find_library(${id}_LIBRARY ${library} ${required})
  if(NOT ${id}_INCLUDE_DIR OR NOT ${id}_LIBRARY)
    return()
  endif()
  file(REAL_PATH ${${id}_LIBRARY} found)
  execute_process(
    COMMAND ${CMAKE_OBJDUMP} -p ${found}
    OUTPUT_VARIABLE headers COMMAND_ERROR_IS_FATAL ANY)
  if(NOT headers MATCHES "SONAME +([^ \n]+)")
    message(FATAL_ERROR "${found} has no soname")
  endif()
  add_library(${target} SHARED IMPORTED)
  set_target_properties(
    ${target} PROPERTIES IMPORTED_LOCATION ${found} IMPORTED_SONAME ${CMAKE_MATCH_1}
                         INTERFACE_INCLUDE_DIRECTORIES ${${id}_INCLUDE_DIR})
endfunction()
