// RecipeBuilder for Python, over described tensors instead of a checkpoint.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>

#include <map>
#include <utility>
#include <vector>

#include "modicum/python/bindings.h"

namespace modicum::python {
namespace {

using Described = std::pair<std::string, std::vector<int64_t>>;  // dtype, shape

Manifest manifest_of(const std::map<std::string, Described>& stored) {
  Manifest manifest;
  manifest.tensors.reserve(stored.size());
  for (const auto& [fqn, described] : stored) {
    manifest.tensors.push_back({spec_of(fqn, described.first, described.second), {}});
  }
  return manifest;
}

struct Held {
  const Manifest manifest;
};
// The builder refers to the manifest, a base so that it is constructed first. Not movable.
struct DescribedBuilder : Held, RecipeBuilder {
  explicit DescribedBuilder(const std::map<std::string, Described>& stored)
      : Held{manifest_of(stored)}, RecipeBuilder(manifest) {}
  DescribedBuilder(const DescribedBuilder&) = delete;
  DescribedBuilder& operator=(const DescribedBuilder&) = delete;
};

// An op as a member function of the bound class.
template <typename... Args>
auto op(uint32_t (RecipeBuilder::*of)(Args...)) {
  return static_cast<uint32_t (DescribedBuilder::*)(Args...)>(of);
}

Described described(const DescribedBuilder& builder, uint32_t node) {
  const Node& made = builder.node(node);
  return {std::string(torch_name(made.dtype)), made.shape};
}

}  // namespace

void define_recipe_builder(nb::module_& module) {
  nb::class_<DescribedBuilder>(module, "RecipeBuilder",
                               R"(Builds index maps of stored tensors (docs/reference/recipes.md).

Each call adds a node and returns its number. No element is read.

Args:
    stored: dtype and shape by name.

Raises:
    UsageError: MISMATCH if shapes or dtypes do not match, UNSUPPORTED for an unknown dtype or more
        than eight dims; from the constructor and every call.)")
      .def(nb::init<const std::map<std::string, Described>&>(), "stored"_a)
      .def("stored", op<std::string_view>(&RecipeBuilder::stored), "name"_a,
           "A tensor of the checkpoint.")
      .def("cat", op(&RecipeBuilder::cat), "dim"_a, "inputs"_a,
           "The inputs, concatenated along `dim`.")
      .def("stack", op(&RecipeBuilder::stack), "dim"_a, "inputs"_a,
           "The inputs, stacked along a new dim.")
      .def("slice", op(&RecipeBuilder::slice), "dim"_a, "start"_a, "stop"_a, "input"_a,
           "`[start, stop)` of `dim`.")
      .def("permute", op(&RecipeBuilder::permute), "dims"_a, "input"_a,
           "Dim k of the node is dim `dims[k]` of the input.")
      .def("reshape", op(&RecipeBuilder::reshape), "shape"_a, "input"_a,
           "The same row-major elements under another shape.")
      .def("described", described, "node"_a, "Dtype and shape of a node.");
}

}  // namespace modicum::python
