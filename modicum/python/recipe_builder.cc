// RecipeBuilder for Python. Its stored tensors are described by dtype and shape; it needs no
// checkpoint.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>

#include <map>
#include <utility>
#include <vector>

#include "modicum/python/bindings.h"

namespace modicum::python {
namespace {

using DtypeAndShape = std::pair<std::string, std::vector<int64_t>>;  // dtype, shape

Manifest manifest_of(const std::map<std::string, DtypeAndShape>& stored) {
  Manifest manifest;
  manifest.tensors.reserve(stored.size());
  for (const auto& [fqn, described] : stored) {
    manifest.tensors.push_back({spec_of(fqn, described.first, described.second), {}});
  }
  return manifest;
}

struct HeldManifest {
  const Manifest manifest;
};
// RecipeBuilder keeps a reference to the manifest. The manifest is in the first base class, so that
// it is constructed before RecipeBuilder. Not movable, since the reference would dangle.
struct DescribedBuilder : HeldManifest, RecipeBuilder {
  explicit DescribedBuilder(const std::map<std::string, DtypeAndShape>& stored)
      : HeldManifest{manifest_of(stored)}, RecipeBuilder(manifest) {}
  DescribedBuilder(const DescribedBuilder&) = delete;
  DescribedBuilder& operator=(const DescribedBuilder&) = delete;
};

// Casts a member function of RecipeBuilder to one of the bound class, which nanobind requires.
template <typename... Args>
auto op(uint32_t (RecipeBuilder::*method)(Args...)) {
  return static_cast<uint32_t (DescribedBuilder::*)(Args...)>(method);
}

DtypeAndShape described(const DescribedBuilder& builder, uint32_t node) {
  const Node& result = builder.node(node);
  return {std::string(torch_name(result.dtype)), result.shape};
}

}  // namespace

void define_recipe_builder(nb::module_& module) {
  nb::class_<DescribedBuilder>(module, "RecipeBuilder",
                               R"(Builds index maps of stored tensors (docs/reference/recipes.md).

Every method except `described` adds a node and returns its number. No element is read.

Args:
    stored: (dtype, shape) of each stored tensor, by name.

Raises:
    UsageError: MISMATCH if an operation does not fit the shapes or dtypes of its inputs, or if a
        name is unknown; UNSUPPORTED for an unknown dtype, or for more than eight dims. Every method
        may raise it.)")
      .def(nb::init<const std::map<std::string, DtypeAndShape>&>(), "stored"_a)
      .def("stored", op<std::string_view>(&RecipeBuilder::stored), "name"_a,
           "The stored tensor `name`.")
      .def("cat", op(&RecipeBuilder::cat), "dim"_a, "inputs"_a,
           "The inputs, concatenated along `dim`.")
      .def("stack", op(&RecipeBuilder::stack), "dim"_a, "inputs"_a,
           "The inputs, stacked along a new dim.")
      .def("slice", op(&RecipeBuilder::slice), "dim"_a, "start"_a, "stop"_a, "input"_a,
           "Indices `[start, stop)` of the input along `dim`.")
      .def("permute", op(&RecipeBuilder::permute), "dims"_a, "input"_a,
           "Dim k of the node is dim `dims[k]` of the input.")
      .def("reshape", op(&RecipeBuilder::reshape), "shape"_a, "input"_a,
           "The input's elements in row-major order, with another shape.")
      .def("described", described, "node"_a, "Dtype and shape of a node.");
}

}  // namespace modicum::python
