# modicum_embed(ROOM FOLDER FUNCTION)
#
# Compiles the text files modicum/ROOM/FOLDER/*.in into the library of ROOM. The header FOLDER.h of
# that room declares `std::string_view FUNCTION(std::string_view file_name)`, which returns a file's
# text, and an empty one for a name that no file has. The source is written when CMake configures,
# and again when a file has changed.
function(modicum_embed room folder function)
  file(GLOB files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/modicum/${room}/${folder}/*.in)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})
  set(cases "")
  foreach(file ${files})
    cmake_path(GET file FILENAME name)
    file(READ ${file} text)
    string(APPEND cases "  if (file_name == \"${name}\") return R\"embed(${text})embed\";\n")
  endforeach()
  set(source ${CMAKE_BINARY_DIR}/${room}_${folder}.cc)
  file(GENERATE OUTPUT ${source} CONTENT
    "#include \"modicum/${room}/${folder}.h\"

std::string_view modicum::${function}(std::string_view file_name) {
${cases}  return {};
}
")
  target_sources(modicum_${room} PRIVATE ${source})
endfunction()
