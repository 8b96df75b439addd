# The program of docs/guide/cpp.md is a test: it is cut out, compiled, and run on a checkpoint.
set(page docs/guide/cpp.md)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${page})
file(READ ${CMAKE_SOURCE_DIR}/${page} text)
string(FIND "${text}" "```cpp\n" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "${page} shows no C++ program")
endif()
math(EXPR begin "${begin} + 7")
string(SUBSTRING "${text}" ${begin} -1 program)
string(FIND "${program}" "```" end)
string(SUBSTRING "${program}" 0 ${end} program)
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/cpp_page.cc CONTENT "${program}" @ONLY)

add_executable(cpp_page ${CMAKE_BINARY_DIR}/cpp_page.cc)
target_link_libraries(cpp_page PRIVATE modicum_stream)
set(page_model ${CMAKE_BINARY_DIR}/cpp_page_model)
add_test(NAME CppPage.MakesACheckpoint
         COMMAND sh -c [[rm -rf "$1" && "$0" synth "$1" --arch tiny-moe]] $<TARGET_FILE:modicum>
                 ${page_model})
add_test(NAME CppPage.TheProgramRuns COMMAND cpp_page ${page_model})
set_tests_properties(CppPage.MakesACheckpoint PROPERTIES FIXTURES_SETUP page_model)
set_tests_properties(
  CppPage.TheProgramRuns
  PROPERTIES FIXTURES_REQUIRED page_model PASS_REGULAR_EXPRESSION "rank 1: [0-9]+ bytes of")
