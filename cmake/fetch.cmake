# With MODICUM_FETCH: third-party libraries as static libraries, compiled from the sources of
# Debian 12, which CMake downloads and checks by their SHA-256. They have the versions of Debian's
# packages, so that a wheel has the values of a build there. Needs make; without m4, SHA-256 is
# computed without the instructions for it.

include(ExternalProject)
include(FetchContent)
enable_language(C)

# modicum_fetch(NAME PATH SHA256 [options]): downloads a file of Debian's archive and unpacks it;
# NAME_SOURCES is its folder. The options are FetchContent's.
function(modicum_fetch name path hash)
  set(urls https://deb.debian.org/debian/pool/main/${path}
           https://archive.debian.org/debian/pool/main/${path})
  FetchContent_Declare(${name} URL ${urls} URL_HASH SHA256=${hash} SOURCE_SUBDIR none
                       ${ARGN})
  FetchContent_MakeAvailable(${name})
  set(${name}_SOURCES ${${name}_SOURCE_DIR} PARENT_SCOPE)
endfunction()

# modicum_fetch_package(NAME FILE PATH SHA256): the same of a binary package.
function(modicum_fetch_package name file path hash)
  modicum_fetch(${name} ${path}/${file} ${hash} DOWNLOAD_NO_EXTRACT ON)
  foreach(archive ${file} data.tar.xz)
    file(ARCHIVE_EXTRACT INPUT ${${name}_SOURCES}/${archive} DESTINATION ${${name}_SOURCES})
  endforeach()
  set(${name}_SOURCES ${${name}_SOURCES}/usr/share PARENT_SCOPE)
endfunction()

# modicum_compile(NAME INCLUDES SOURCES...): NAME::NAME, a library of the sources in NAME_SOURCES.
function(modicum_compile name includes)
  list(TRANSFORM ARGN PREPEND ${${name}_SOURCES}/ OUTPUT_VARIABLE sources)
  add_library(${name} STATIC EXCLUDE_FROM_ALL ${sources})
  add_library(${name}::${name} ALIAS ${name})
  target_compile_options(${name} PRIVATE -w)
  target_include_directories(${name} SYSTEM PUBLIC ${${name}_SOURCES}/${includes})
  target_link_libraries(${name} PRIVATE Threads::Threads)
endfunction()

# A project above may have a library of its own already. Then that is linked.
foreach(name fmt simdjson hwy re2 nettle)
  if(TARGET ${name} AND NOT TARGET ${name}::${name})
    add_library(${name}::${name} ALIAS ${name})
  endif()
endforeach()

if(NOT TARGET fmt::fmt)
  modicum_fetch(fmt f/fmtlib/fmtlib_9.1.0+ds1.orig.tar.gz
                84ce1c2d0be3a9863935137969dcec6970125caac032f82474640bfc81463583)
  modicum_compile(fmt include src/format.cc src/os.cc)
endif()

if(NOT TARGET simdjson::simdjson)
  modicum_fetch(simdjson s/simdjson/simdjson_3.0.1.orig.tar.gz
                156b1bc5eb0561b2bd166b46d191fd3d95a3e709cc63761477d3b7aec2b6e9ed)
  modicum_compile(simdjson include src/simdjson.cpp)
  target_include_directories(simdjson PRIVATE ${simdjson_SOURCES}/src)
endif()

if(NOT TARGET hwy::hwy)
  modicum_fetch(hwy h/highway/highway_1.0.3.orig.tar.gz
                566fc77315878473d9a6bd815f7de78c73734acdcb745c3dde8579560ac5440e)
  modicum_compile(hwy . hwy/aligned_allocator.cc hwy/per_target.cc hwy/print.cc hwy/targets.cc)
endif()

if(NOT TARGET re2::re2)
  modicum_fetch(re2 r/re2/re2_20220601+dfsg.orig.tar.xz
                3bc61251da3b0b97be40a8a127818c517c62516e4eda11fc901d29496663df54)
  # Debian's sources lack RE2's tables, which come from Unicode's data and from Perl.
  modicum_fetch_package(unicode unicode-data_15.0.0-1_all.deb u/unicode-data
                        5efef23bbb1c6a133ecbdd63a2cfa07159ccacf5466a49e2426101c5ecd691fc)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  find_program(PERL perl REQUIRED)
  set(tables "")
  foreach(table unicode_groups unicode_casefold perl_groups)
    set(generator ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/re2_tables.py make_${table}
                  ${re2_SOURCES}/re2 ${unicode_SOURCES}/unicode)
    if(table STREQUAL "perl_groups")
      set(generator ${PERL} ${re2_SOURCES}/re2/make_${table}.pl)
    endif()
    execute_process(COMMAND ${generator} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
    file(GENERATE OUTPUT ${re2_SOURCES}/re2/${table}.cc CONTENT "${text}")
    list(APPEND tables re2/${table}.cc)
  endforeach()
  file(GLOB parts RELATIVE ${re2_SOURCES} ${re2_SOURCES}/re2/*.cc)
  list(REMOVE_ITEM parts ${tables})
  modicum_compile(re2 . ${parts} ${tables} util/rune.cc util/strutil.cc)
endif()

if(NOT TARGET nettle::nettle)
  # Its assembler code comes from m4, so its own Makefile compiles it. Of that only SHA-256 is
  # linked. With the archive's times: by those of extraction, some generated files could be older
  # than their sources, and make would generate them again.
  modicum_fetch(nettle n/nettle/nettle_3.8.1.orig.tar.gz
                364f3e2b77cd7dcde83fd7c45219c834e54b0c75e428b6f894a23d12dd41cbfe
                DOWNLOAD_EXTRACT_TIMESTAMP ON)
  find_program(M4 m4)
  find_program(MAKE NAMES gmake make REQUIRED)
  set(nettle_build ${PROJECT_BINARY_DIR}/nettle)
  string(JOIN " " nettle_flags -O2 -g0 -w -fPIC -ffile-prefix-map=${nettle_SOURCES}=nettle)
  ExternalProject_Add(
    nettle_library
    SOURCE_DIR ${nettle_SOURCES}
    BINARY_DIR ${nettle_build}
    CONFIGURE_COMMAND
      ${nettle_SOURCES}/configure --quiet --host=${CMAKE_SYSTEM_PROCESSOR}-linux-gnu
      --disable-shared --disable-public-key --disable-openssl --disable-documentation
      $<IF:$<BOOL:${M4}>,--enable-fat,--disable-assembler> CC=${CMAKE_C_COMPILER} AR=${CMAKE_AR}
      RANLIB=${CMAKE_RANLIB} CFLAGS=${nettle_flags}
    BUILD_COMMAND ${MAKE} --quiet libnettle.a
    INSTALL_COMMAND ${CMAKE_COMMAND} -E create_symlink ${nettle_SOURCES} ${nettle_build}/nettle
    BUILD_BYPRODUCTS ${nettle_build}/libnettle.a
    EXCLUDE_FROM_ALL ON)
  add_library(nettle::nettle STATIC IMPORTED GLOBAL)
  set_target_properties(nettle::nettle PROPERTIES IMPORTED_LOCATION ${nettle_build}/libnettle.a)
  target_include_directories(nettle::nettle INTERFACE ${nettle_build})
  add_dependencies(nettle::nettle nettle_library)
endif()

modicum_fetch(xxhash x/xxhash/xxhash_0.8.1.orig.tar.gz
              3bb6b7d6f30c591dd65aaaff1c8b7a5b94d81687998ca9400082c739a690436c)
set(XXHASH_INCLUDE_DIR ${xxhash_SOURCES})

if(MODICUM_PROGRAM)
  modicum_fetch(cli11 c/cli11/cli11_2.1.2+ds.orig.tar.xz
                8143d20b688e98ccce8e24562d3b68e5f47c12e896c42c7ca8553dbde5bed55d)
  set(CLI11_INCLUDE_DIR ${cli11_SOURCES}/include)
  # The package, since the sources are not minified.
  modicum_fetch_package(dygraphs libjs-dygraphs_2.2.1-1_all.deb d/dygraphs
                        64ba6b442cac22374f01412bc6b0b6116dcf32bc251ed6c1dc7c5134c9ec2a00)
  set(DYGRAPHS_DIR ${dygraphs_SOURCES}/javascript/dygraphs)
  set(DYGRAPHS_LICENCE ${dygraphs_SOURCES}/doc/libjs-dygraphs/copyright)
endif()

if(MODICUM_TESTS AND NOT TARGET GTest::gtest_main)
  modicum_fetch(gtest g/googletest/googletest_1.12.1.orig.tar.gz
                81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2)
  modicum_compile(gtest googletest/include googletest/src/gtest-all.cc googletest/src/gtest_main.cc)
  target_include_directories(gtest PRIVATE ${gtest_SOURCES}/googletest)
  add_library(GTest::gtest_main ALIAS gtest)
endif()
