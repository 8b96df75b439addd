# The README's program is a test: it is cut out of README.md, compiled, and run on a checkpoint.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/README.md)
file(READ ${CMAKE_SOURCE_DIR}/README.md readme)
string(FIND "${readme}" "```cpp\n" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "README.md shows no C++ program")
endif()
math(EXPR begin "${begin} + 7")
string(SUBSTRING "${readme}" ${begin} -1 program)
string(FIND "${program}" "```" end)
string(SUBSTRING "${program}" 0 ${end} program)
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/readme_walk.cc CONTENT "${program}" @ONLY)

add_executable(readme_walk ${CMAKE_BINARY_DIR}/readme_walk.cc)
target_link_libraries(readme_walk PRIVATE modicum_stream)
set(walk_model ${CMAKE_BINARY_DIR}/readme_walk_model)
set(make_model "rm -rf ${walk_model} && $<TARGET_FILE:modicum> synth ${walk_model} --arch tiny-moe")
add_test(NAME Readme.MakesACheckpoint COMMAND sh -c "${make_model}")
add_test(NAME Readme.TheWalkRuns COMMAND readme_walk ${walk_model})
set_tests_properties(Readme.MakesACheckpoint PROPERTIES FIXTURES_SETUP walk_model)
set_tests_properties(
  Readme.TheWalkRuns
  PROPERTIES FIXTURES_REQUIRED walk_model PASS_REGULAR_EXPRESSION "rank 1: [0-9]+ bytes of")
