# The content of the wheel besides its Python sources: the module `_modicum`, the program `modicum`,
# and the shared libraries that both need and that a machine may lack. All are in one folder, which
# the module and the program search first (RPATH). With MODICUM_FETCH these libraries are static.

# scikit-build-core sets the component if the module is to work with later CPythons, too
# (wheel.py-api in pyproject.toml).
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
execute_process(
  COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

# nanobind 3.1 includes no header for stderr if the library is libc++ and the ABI the stable one.
add_compile_options(-include cstdio)
file(GLOB binding_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/modicum/python/*.cc)
nanobind_add_module(_modicum STABLE_ABI NB_STATIC NB_SUPPRESS_WARNINGS ${binding_sources})
set_target_properties(_modicum PROPERTIES UNITY_BUILD ${MODICUM_PRECOMPILE}
                                          UNITY_BUILD_BATCH_SIZE 7)
target_compile_definitions(_modicum PRIVATE MODICUM_VERSION="${PROJECT_VERSION}")
target_link_libraries(_modicum PRIVATE modicum_training modicum_flags)
set_target_properties(_modicum modicum PROPERTIES INSTALL_RPATH "$ORIGIN")

install(TARGETS _modicum modicum DESTINATION modicum COMPONENT python)
if(SKBUILD)
  install(
    PROGRAMS ${PROJECT_SOURCE_DIR}/modicum/python/command.py
    DESTINATION ${SKBUILD_SCRIPTS_DIR}
    RENAME modicum
    COMPONENT python)
endif()

if(MODICUM_FETCH)
  # Nothing but the module's entry is visible. So a C++ runtime that is linked statically never
  # mixes with that of other modules in the process.
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/exports.map
       CONTENT "{ global: PyInit__modicum; local: *; };")
  target_link_options(_modicum PRIVATE
                      LINKER:--version-script=${PROJECT_BINARY_DIR}/exports.map)
  # The licences of the libraries that are linked statically. MODICUM_LIBCXX: the folder of libc++,
  # if it is one of them.
  file(GLOB nanobind_SOURCES ${nanobind_ROOT}/../../nanobind-*.dist-info/licenses)
  set(libcxx_SOURCES ${MODICUM_LIBCXX})
  foreach(library cli11 fmt hwy libcxx nanobind nettle re2 simdjson xxhash)
    file(GLOB texts ${${library}_SOURCES}/LICENSE* ${${library}_SOURCES}/COPYING*)
    foreach(text ${texts})
      get_filename_component(file ${text} NAME)
      install(FILES ${text} DESTINATION modicum/licenses RENAME ${library}-${file} COMPONENT python)
    endforeach()
  endforeach()
  return()
endif()

# Under their sonames, by which the loader finds them.
foreach(library simdjson::simdjson fmt::fmt hwy::hwy nettle::nettle re2::re2)
  install(
    FILES $<TARGET_FILE:${library}>
    DESTINATION modicum
    RENAME $<TARGET_SONAME_FILE_NAME:${library}>
    COMPONENT python)
endforeach()
