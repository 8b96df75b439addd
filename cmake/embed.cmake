# modicum_embed(ROOM FOLDER FUNCTION [files...])
#
# Compiles the files of modicum/ROOM/FOLDER, and the given files, into the library of ROOM. A header
# of that room, FOLDER.h, declares `std::string_view FUNCTION(std::string_view file_name)`, which
# returns a file's text, or an empty one if no file has this name. The source is written when CMake
# configures, and again when a file has changed.
function(modicum_embed room folder function)
  file(GLOB files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/modicum/${room}/${folder}/*)
  list(APPEND files ${ARGN})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})
  set(texts "")
  set(cases "")
  foreach(file ${files})
    cmake_path(GET file FILENAME name)
    string(MAKE_C_IDENTIFIER "text_of_${name}" id)
    file(READ ${file} bytes HEX)
    # As numbers: compilers limit the length of a string literal.
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
    string(APPEND texts "const unsigned char ${id}[] = {${bytes}};\n")
    string(APPEND cases "  if (file_name == \"${name}\") return text(${id}, sizeof ${id});\n")
  endforeach()
  set(source ${PROJECT_BINARY_DIR}/${room}_${folder}.cc)
  file(GENERATE OUTPUT ${source} CONTENT
    "#include \"modicum/${room}/${folder}.h\"

#include <cstddef>

namespace {

${texts}
std::string_view text(const unsigned char* bytes, size_t size) {
  return {reinterpret_cast<const char*>(bytes), size};
}

}  // namespace

std::string_view modicum::${function}(std::string_view file_name) {
${cases}  return {};
}
")
  target_sources(modicum_${room} PRIVATE ${source})
endfunction()
