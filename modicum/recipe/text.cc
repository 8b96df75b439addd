// recipe.json: reading and writing.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <climits>

#include "modicum/json/json.h"
#include "modicum/recipe/recipe.h"

namespace modicum {
namespace {

constexpr std::array<std::string_view, 3> kRules = {"zeros", "ones", "normal"};  // as in InitRule

// A parsed node. The keys that its op needs are not yet checked.
struct WrittenNode {
  std::string op, rule, dtype;
  std::optional<std::string> name, target;
  std::optional<int64_t> dim, start, stop;
  std::optional<double> std;
  std::vector<int64_t> dims, index, shape;
  std::vector<WrittenNode> in;
};

std::string all_op_names() {
  std::string names;
  for (auto op = Op::stored; op <= Op::alias; op = static_cast<Op>(static_cast<int>(op) + 1)) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", op_name(op));
  }
  return names;
}

std::vector<int64_t> read_integers(JsonValue& value) {
  std::vector<int64_t> numbers;
  value.array([&](JsonValue& element) { numbers.push_back(element.integer()); });
  return numbers;
}

WrittenNode read_node(JsonValue& value) {
  WrittenNode node;
  value.object([&](std::string_view key, JsonValue& v) {
    if (key == "op")
      node.op = v.string();
    else if (key == "name")
      node.name = v.string();
    else if (key == "of")
      node.target = v.string();
    else if (key == "rule")
      node.rule = v.string();
    else if (key == "dtype")
      node.dtype = v.string();
    else if (key == "dim")
      node.dim = v.integer();
    else if (key == "start")
      node.start = v.integer();
    else if (key == "stop")
      node.stop = v.integer();
    else if (key == "std")
      node.std = v.number();
    else if (key == "dims")
      node.dims = read_integers(v);
    else if (key == "index")
      node.index = read_integers(v);
    else if (key == "shape")
      node.shape = read_integers(v);
    else if (key == "in")
      v.array([&](JsonValue& in) { node.in.push_back(read_node(in)); });
    else
      fail(Category::mismatch,
           fmt::format("a recipe node has an unknown key '{}'", printable(key)));
  });
  // Here, so that the memory of all nodes is in proportion to the text.
  if (node.op.empty()) {
    fail(Category::unsupported, "a recipe node has no op", {.expected = all_op_names()});
  }
  return node;
}

// Builds a recipe from parsed nodes. Every error of `target` names the target.
class Reading {
 public:
  Reading(const Manifest& manifest, bool unties) : builder_(manifest, unties) {}

  void target(const std::string& fqn, const WrittenNode& node) {
    try {
      if (node.op == "alias") return alias(fqn, node);
      const uint32_t root = build(node);
      builder_.target(fqn, root, dtype_of(node));
    } catch (const Error& error) {
      Facts facts = error.facts();
      if (facts.tensor.empty()) facts.tensor = fqn;
      const std::string where =
          facts.tensor == fqn ? "" : fmt::format(" (target '{}')", printable(fqn));
      fail(error.category(), error.what_happened() + where, std::move(facts));
    }
  }
  RecipeBuilder& builder() { return builder_; }

 private:
  static std::optional<DType> dtype_of(const WrittenNode& node) {
    if (node.dtype.empty()) return std::nullopt;
    const auto dtype = dtype_from_torch_name(node.dtype);
    if (!dtype) {
      fail(Category::mismatch, "an unknown dtype",
           {.expected = "a name such as float32", .got = printable(node.dtype)});
    }
    return dtype;
  }

  template <typename T>
  static const T& need(const std::optional<T>& value, const WrittenNode& node,
                       std::string_view key) {
    if (!value) fail(Category::mismatch, fmt::format("'{}' lacks its '{}'", node.op, key));
    return *value;
  }

  uint32_t only_input(const WrittenNode& node) {
    if (node.in.size() != 1) {
      fail(Category::mismatch, fmt::format("'{}' takes one input", node.op),
           {.expected = "1", .got = fmt::format("{}", node.in.size())});
    }
    return input(node.in[0]);
  }

  // A cast applies to a whole target, so only its root may have a dtype. `init` and `caller` state
  // the dtype of the elements that they produce.
  uint32_t input(const WrittenNode& node) {
    if (!node.dtype.empty() && node.op != "init" && node.op != "caller") {
      fail(Category::mismatch,
           fmt::format("'{}' inside another op has a 'dtype'", printable(node.op)),
           {.expected = "a dtype at the target's root", .got = printable(node.dtype)});
    }
    return build(node);
  }

  void alias(const std::string& fqn, const WrittenNode& node) {
    if (!node.dtype.empty()) {
      fail(Category::mismatch, "an alias has a 'dtype'",
           {.expected = "no dtype: an alias has its target's", .got = printable(node.dtype)});
    }
    const std::string& target_fqn = need(node.target, node, "of");
    if (node.in.empty()) return builder_.alias(fqn, target_fqn);
    builder_.alias(fqn, target_fqn, only_input(node));
  }

  uint32_t init(const WrittenNode& node) {
    for (size_t rule = 0; rule < kRules.size(); ++rule) {
      if (node.rule != kRules[rule]) continue;
      const auto kind = static_cast<InitRule>(rule);
      const double std = kind == InitRule::normal ? need(node.std, node, "std") : 0;
      return builder_.init(kind, std, node.shape, need(dtype_of(node), node, "dtype"));
    }
    fail(Category::unsupported, fmt::format("an unknown init rule '{}'", printable(node.rule)),
         {.expected = fmt::format("{}", fmt::join(kRules, ", "))});
  }

  uint32_t build(const WrittenNode& node) {
    const auto dim = [&] {
      return static_cast<int>(std::clamp<int64_t>(need(node.dim, node, "dim"), INT_MIN, INT_MAX));
    };
    if (node.op == "stored")
      return builder_.stored(std::string_view(need(node.name, node, "name")));
    if (node.op == "cat" || node.op == "stack") {
      std::vector<uint32_t> in;
      for (const WrittenNode& each : node.in) in.push_back(input(each));
      return node.op == "cat" ? builder_.cat(dim(), std::move(in))
                              : builder_.stack(dim(), std::move(in));
    }
    if (node.op == "slice") {
      return builder_.slice(dim(), need(node.start, node, "start"), need(node.stop, node, "stop"),
                            only_input(node));
    }
    if (node.op == "permute") return builder_.permute(node.dims, only_input(node));
    if (node.op == "gather") return builder_.gather(dim(), node.index, only_input(node));
    if (node.op == "reshape") return builder_.reshape(node.shape, only_input(node));
    if (node.op == "init") return init(node);
    if (node.op == "caller") {
      return builder_.caller(callers_++, node.shape, need(dtype_of(node), node, "dtype"));
    }
    if (node.op == "alias") fail(Category::mismatch, "'alias' is inside another op");
    fail(Category::unsupported, fmt::format("an unknown op '{}'", printable(node.op)),
         {.expected = all_op_names()});
  }

  RecipeBuilder builder_;
  uint32_t callers_ = 0;
};

void write_integers(std::string_view key, const std::vector<int64_t>& numbers, JsonWriter& out) {
  out.key(key).begin_array();
  for (const int64_t n : numbers) out.value(n);
  out.end_array();
}

void write_node(const Recipe& recipe, const Manifest& manifest, uint32_t id,
                std::optional<DType> cast_to, JsonWriter& out) {
  const Node& node = recipe.nodes[id];
  const bool states_dtype = node.op == Op::init || node.op == Op::caller;
  if (states_dtype && cast_to) {
    // The 'dtype' of this node is that of its elements. The cast is written as the 'dtype' of a
    // reshape to the same shape.
    out.begin_object().member("op", op_name(Op::reshape));
    write_integers("shape", node.shape, out);
    out.key("in").begin_array();
    write_node(recipe, manifest, id, std::nullopt, out);
    out.end_array().member("dtype", torch_name(*cast_to)).end_object();
    return;
  }
  out.begin_object().member("op", op_name(node.op));
  switch (node.op) {
    case Op::stored: out.member("name", manifest.tensors[node.from].spec.fqn); break;
    case Op::cat:
    case Op::stack: out.member("dim", node.dim); break;
    case Op::slice:
      out.member("dim", node.dim).member("start", node.arg[0]);
      out.member("stop", node.arg[0] + node.shape[static_cast<size_t>(node.dim)]);
      break;
    case Op::permute: write_integers("dims", node.arg, out); break;
    case Op::gather:
      out.member("dim", node.dim);
      write_integers("index", node.arg, out);
      break;
    case Op::init:
      out.member("rule", kRules[static_cast<size_t>(node.arg[0])]);
      out.member("std", std::bit_cast<double>(node.arg[1]));
      write_integers("shape", node.shape, out);
      break;
    case Op::reshape:
    case Op::caller: write_integers("shape", node.shape, out); break;
    case Op::alias: out.member("of", recipe.targets[node.from].spec.fqn); break;
  }
  if (!node.in.empty()) {
    out.key("in").begin_array();
    for (const uint32_t input : node.in) write_node(recipe, manifest, input, std::nullopt, out);
    out.end_array();
  }
  if (states_dtype) out.member("dtype", torch_name(node.dtype));
  if (cast_to) out.member("dtype", torch_name(*cast_to));
  out.end_object();
}

}  // namespace

Recipe parse_recipe(std::string_view text, const Manifest& manifest, bool unties) {
  Reading reading(manifest, unties);
  bool has_targets = false;
  try {
    read_json(text, [&](JsonValue& root) {
      root.object([&](std::string_view key, JsonValue& value) {
        if (key == "targets") {
          has_targets = true;
          value.object([&](std::string_view fqn, JsonValue& node) {
            const std::string name(fqn);
            WrittenNode written;
            naming_tensor(name, [&] { written = read_node(node); });
            reading.target(name, written);
          });
        } else if (key == "unused") {
          value.array([&](JsonValue& name) { reading.builder().unused(name.string()); });
        } else {
          fail(Category::mismatch, fmt::format("a recipe has an unknown key '{}'", printable(key)));
        }
      });
    });
  } catch (const JsonError& error) {
    fail(Category::mismatch, fmt::format("invalid recipe.json: {}", error.what()),
         {.offset = error.offset});
  }
  if (!has_targets) fail(Category::mismatch, "the recipe has no 'targets'");
  return reading.builder().finish();
}

std::string recipe_text(const Recipe& recipe, const Manifest& manifest) {
  JsonWriter out;
  out.begin_object().key("targets").begin_object();
  for (const Target& target : recipe.targets) {
    const Node& root = recipe.nodes[target.root];
    out.key(target.spec.fqn);
    const bool is_cast = root.op != Op::alias && target.spec.dtype != root.dtype;
    write_node(recipe, manifest, target.root,
               is_cast ? std::optional(target.spec.dtype) : std::nullopt, out);
  }
  out.end_object().key("unused").begin_array();
  for (const uint32_t tensor : recipe.unused) out.value(manifest.tensors[tensor].spec.fqn);
  out.end_array().end_object();
  return out.text();
}

}  // namespace modicum
