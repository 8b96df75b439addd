// The Python module `modicum._modicum`.
#include <nanobind/nanobind.h>

NB_MODULE(_modicum, module) {
  module.def(
      "version", [] { return MODICUM_VERSION; }, "The version of the library, as in the wheel.");
}
