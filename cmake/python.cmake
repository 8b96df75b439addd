# The content of the wheel besides its Python sources: the module `_modicum`, the program `modicum`,
# and the shared libraries that both need and that a machine may lack. All are in one folder, which
# the module and the program search first (RPATH).

find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

file(GLOB binding_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/modicum/python/*.cc)
nanobind_add_module(_modicum NB_STATIC NB_SUPPRESS_WARNINGS ${binding_sources})
set_target_properties(_modicum PROPERTIES UNITY_BUILD ${MODICUM_PRECOMPILE}
                                          UNITY_BUILD_BATCH_SIZE 7)
target_compile_definitions(_modicum PRIVATE MODICUM_VERSION="${PROJECT_VERSION}")
target_link_libraries(_modicum PRIVATE modicum_training modicum_flags)
set_target_properties(_modicum modicum PROPERTIES INSTALL_RPATH "$ORIGIN")

install(TARGETS _modicum modicum DESTINATION modicum COMPONENT python)

# Under their sonames, by which the loader finds them.
foreach(library simdjson::simdjson fmt::fmt hwy::hwy nettle::nettle re2::re2)
  install(
    FILES $<TARGET_FILE:${library}>
    DESTINATION modicum
    RENAME $<TARGET_SONAME_FILE_NAME:${library}>
    COMPONENT python)
endforeach()
