# modicum_room(NAME [DEPENDS rooms...] [PRIVATE libraries...])
#
# A room is a folder of modicum/. Makes a static library of modicum/NAME/*.cc, modicum::NAME, which
# may include the public headers of the rooms that it depends on, and (with MODICUM_TESTS) one test
# program of modicum/NAME/*_test.cc. Files ending in _double.cc or _doubles.cc are test doubles, in
# a separate library that only tests link. Each test has the label NAME. With
# MODICUM_SANITIZE=fuzzer each *_fuzz.cc is a program instead.

# Our targets link this as PRIVATE, so that a project that links a room keeps its own flags.
add_library(modicum_flags INTERFACE)
target_include_directories(modicum_flags SYSTEM INTERFACE ${XXHASH_INCLUDE_DIR})
# Warnings are errors with the compilers that the tests use.
set(warnings_are_errors ${PROJECT_IS_TOP_LEVEL})
if(MODICUM_FETCH)
  set(warnings_are_errors OFF)
endif()
target_compile_options(
  modicum_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor
                          -Wno-missing-field-initializers
                          $<$<BOOL:${warnings_are_errors}>:-Werror>)
target_link_libraries(modicum_flags INTERFACE fmt::fmt Threads::Threads)
if(MODICUM_PRECOMPILE)
  # GCC 12 forgets that precompiled headers are system headers, and warns about std::string.
  foreach(warning array-bounds stringop-overflow restrict)
    target_compile_options(modicum_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-${warning}>)
  endforeach()
endif()
if(MODICUM_SANITIZE STREQUAL "address")
  # With these flags GCC 12 warns about the members of an empty std::optional.
  target_compile_options(modicum_flags INTERFACE -fsanitize=address,undefined
                                                 -fno-sanitize-recover=all -fno-omit-frame-pointer
                                                 $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  target_link_options(modicum_flags INTERFACE -fsanitize=address,undefined)
elseif(MODICUM_SANITIZE STREQUAL "fuzzer")
  set(fuzzer_flags -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=all)
  target_compile_options(modicum_flags INTERFACE ${fuzzer_flags})
  target_link_options(modicum_flags INTERFACE ${fuzzer_flags})
elseif(MODICUM_SANITIZE STREQUAL "thread")
  target_compile_options(modicum_flags INTERFACE -fsanitize=thread -fno-omit-frame-pointer)
  target_link_options(modicum_flags INTERFACE -fsanitize=thread)
endif()

# Headers that many files include, precompiled once for all libraries and once for all tests. They
# hide a missing include, so that only builds without MODICUM_PRECOMPILE fail.
set(often_included
    <algorithm>
    <array>
    <functional>
    <map>
    <memory>
    <optional>
    <span>
    <string>
    <string_view>
    <vector>
    <fmt/format.h>)

# modicum_precompile(TARGET OWNER [headers...]): TARGET uses the precompiled headers of OWNER. The
# first call must have TARGET = OWNER; it precompiles often_included and the given headers.
function(modicum_precompile target owner)
  if(NOT MODICUM_PRECOMPILE)
    return()
  endif()
  if(target STREQUAL owner)
    target_precompile_headers(${target} PRIVATE ${often_included} ${ARGN})
  else()
    target_precompile_headers(${target} REUSE_FROM ${owner})
  endif()
endfunction()

if(MODICUM_TESTS)
  enable_testing()
  if(NOT TARGET GTest::gtest_main)
    find_package(GTest REQUIRED)
  endif()
  include(GoogleTest)
endif()

function(modicum_room name)
  cmake_parse_arguments(ROOM "" "" "DEPENDS;PRIVATE" ${ARGN})
  set(directory ${PROJECT_SOURCE_DIR}/modicum/${name})
  file(GLOB sources CONFIGURE_DEPENDS ${directory}/*.cc)
  set(tests ${sources})
  set(doubles ${sources})
  set(fuzzers ${sources})
  list(FILTER sources EXCLUDE REGEX "(_test|_fuzz|_doubles?|/main)\\.cc$")
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  list(FILTER doubles INCLUDE REGEX "_doubles?\\.cc$")
  list(FILTER fuzzers INCLUDE REGEX "_fuzz\\.cc$")
  list(TRANSFORM ROOM_DEPENDS PREPEND modicum_ OUTPUT_VARIABLE rooms)

  add_library(modicum_${name} STATIC ${sources})
  if(NOT PROJECT_IS_TOP_LEVEL)  # then only the rooms that a target links are built
    set_target_properties(modicum_${name} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  add_library(modicum::${name} ALIAS modicum_${name})
  target_compile_features(modicum_${name} PUBLIC cxx_std_20)
  target_include_directories(
    modicum_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  set_target_properties(modicum_${name} PROPERTIES EXPORT_NAME ${name})
  set_property(GLOBAL APPEND PROPERTY MODICUM_ROOMS ${name})
  target_link_libraries(modicum_${name} PUBLIC ${rooms} PRIVATE modicum_flags ${ROOM_PRIVATE})
  modicum_precompile(modicum_${name} modicum_base)
  # With MODICUM_PRECOMPILE, seven files of a room are compiled at a time, which halves the compile
  # time. So local names differ within a room, except in these two.
  if(MODICUM_PRECOMPILE AND NOT name MATCHES "^(json|training)$")
    set_target_properties(modicum_${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 7)
  endif()

  if(MODICUM_TESTS AND doubles)
    get_property(lower_doubles GLOBAL PROPERTY MODICUM_DOUBLES)
    add_library(modicum_${name}_doubles STATIC ${doubles})
    target_link_libraries(modicum_${name}_doubles PUBLIC modicum_${name} ${lower_doubles}
                                                  PRIVATE modicum_flags)
    set_property(GLOBAL APPEND PROPERTY MODICUM_DOUBLES modicum_${name}_doubles)
  endif()
  if(MODICUM_SANITIZE STREQUAL "fuzzer")
    get_property(all_doubles GLOBAL PROPERTY MODICUM_DOUBLES)
    foreach(fuzzer ${fuzzers})
      get_filename_component(program ${fuzzer} NAME_WE)
      add_executable(${program} ${fuzzer})
      target_link_libraries(${program} PRIVATE modicum_${name} modicum_flags ${all_doubles})
      target_link_options(${program} PRIVATE -fsanitize=fuzzer)
    endforeach()
  elseif(MODICUM_TESTS AND tests)
    get_property(all_doubles GLOBAL PROPERTY MODICUM_DOUBLES)
    add_executable(modicum_${name}_test ${tests})
    target_link_libraries(modicum_${name}_test PRIVATE modicum_${name} modicum_flags
                                                       ${all_doubles} GTest::gtest_main)
    # Compiling takes half as long as with -O1. What is tested keeps its own optimisation.
    target_compile_options(modicum_${name}_test PRIVATE -O0)
    modicum_precompile(modicum_${name}_test modicum_base_test <gtest/gtest.h>)
    gtest_discover_tests(modicum_${name}_test DISCOVERY_TIMEOUT 60 PROPERTIES LABELS ${name})
  endif()
endfunction()
