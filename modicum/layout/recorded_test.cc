// Compares layouts with the answers of torch's DTensor and FSDP2 and of DeepSpeed's ZeRO, which
// tests/fixtures/record_cuts.py has recorded; it describes the lines. scripts/conformance.py
// records them again with each version of torch. Catches: any shard, strided ones included, is one
// element off; TP shards after FSDP does; chunks are rounded down; mesh axes are swapped; a ZeRO
// partition lacks its alignment or padding, or has another order.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <sstream>

#include "modicum/layout/held_ids_double.h"
#include "modicum/layout/layout.h"

namespace modicum {
namespace {

constexpr const char* kRecorded =
#include "modicum/layout/torch_cuts_double.inc"
    ;
constexpr int64_t kSizes = 41;  // of a dim: 0 to 40

using Words = std::vector<std::string>;

struct Recording {
  std::map<std::string, Words> owners, rows;  // by number: a word for each size, or one for all
  std::vector<Words> torch, zero, zero3;
};

// The words of a line, which are separated by spaces.
Words words_of(const std::string& line) {
  std::istringstream in(line);
  Words words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

Recording recorded() {
  Recording all;
  std::istringstream in(kRecorded);
  std::string line;
  std::getline(in, line);  // the versions
  while (std::getline(in, line)) {
    Words words = words_of(line);
    const std::string kind = words[0];
    if (kind == "owners" || kind == "rows") {
      const std::string number = words[1].substr(0, words[1].size() - 1);
      words.erase(words.begin(), words.begin() + 2);
      (kind == "owners" ? all.owners : all.rows)[number] = std::move(words);
    } else {
      (kind == "zero" ? all.zero : kind == "zero3" ? all.zero3 : all.torch).push_back(words);
    }
  }
  return all;
}

const std::string& at_size(const Words& words, int64_t n) {
  return words.size() == 1 ? words[0] : words.at(static_cast<size_t>(n));
}

std::vector<int> numbers(const std::string& text, char separator) {
  std::istringstream in(text);
  std::vector<int> found;
  for (std::string word; std::getline(in, word, separator);) found.push_back(std::stoi(word));
  return found;
}

// A shape such as "3,n".
TensorSpec tensor(const std::string& shape, int64_t n, DType dtype = DType::f32) {
  std::istringstream in(shape);
  TensorSpec spec{"t", Role::param, dtype, {}};
  for (std::string size; std::getline(in, size, ',');) {
    spec.shape.push_back(size == "n" ? n : std::stoll(size));
  }
  return spec;
}

Sharding sharding_of(const std::string& name, std::vector<int> mesh, int dim) {
  if (name == "fsdp2") return fsdp2_layout(mesh[0], dim).kinds[0];
  if (name == "hsdp") return hsdp_layout(mesh[0], {mesh[1]}, dim).kinds[0];
  if (name == "experts") {
    Layout layout = fsdp2_layout(mesh[0] * mesh[1]);
    return layout.kinds[add_expert_kind(layout, mesh[0], mesh[1], dim)];
  }
  const std::map<std::string, TpKind> kinds = {{"columns", TpKind::columns},
                                               {"rows", TpKind::rows},
                                               {"packed", TpKind::packed},
                                               {"replicated", TpKind::replicated}};
  const int tp = mesh.back();
  mesh.pop_back();
  return tp_fsdp_layout(mesh, tp, dim).kinds[static_cast<size_t>(kinds.at(name))];
}

// One dim of a tensor: the part of each rank, and for each size the part that holds each index.
struct OwnedDim {
  std::string part_of_rank;  // empty: every rank holds all indices
  const Words* owners = nullptr;

  std::vector<int64_t> held_indices(int64_t size, int64_t n, int rank) const {
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < size; ++i) {
      if (owners == nullptr || at_size(*owners, n).at(static_cast<size_t>(i)) ==
                                   part_of_rank.at(static_cast<size_t>(rank))) {
        indices.push_back(i);
      }
    }
    return indices;
  }
};

// A rank's shard as it was recorded: its shape, and its elements in order.
struct Shard {
  std::vector<int64_t> shape;
  std::vector<int64_t> ids = {0};
};

Shard shard_of(const std::vector<OwnedDim>& dims, const TensorSpec& target, int64_t n, int rank) {
  Shard shard;
  for (size_t d = 0; d < dims.size(); ++d) {
    const auto indices = dims[d].held_indices(target.shape[d], n, rank);
    std::vector<int64_t> ids;
    ids.reserve(shard.ids.size() * indices.size());
    for (const int64_t outer : shard.ids) {
      for (const int64_t i : indices) ids.push_back(outer * target.shape[d] + i);
    }
    shard.ids = std::move(ids);
    shard.shape.push_back(static_cast<int64_t>(indices.size()));
  }
  return shard;
}

std::vector<int64_t> ids_of_runs(const Sharding& sharding, const TensorSpec& target, int rank) {
  std::vector<int> order(target.shape.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<int64_t> ids;
  for (const ElementRun& run : runs_of(sharding, target, rank, order)) {
    for (int64_t i = run.first; i < run.first + run.n; ++i) ids.push_back(i);
  }
  return ids;
}

// The value of a digit: 0-9, a-z, A-Z.
int64_t digit(char c) { return c <= '9' ? c - '0' : c >= 'a' ? c - 'a' + 10 : c - 'A' + 36; }

void expect_recorded(const Recording& all, const Words& words) {
  const std::string& shape = words.at(5);
  const std::vector<int> mesh = numbers(words[1], 'x');
  const Sharding sharding = sharding_of(words[0], mesh, std::stoi(words[3]));
  std::vector<OwnedDim> dims;
  size_t at = 6;
  for (; at < words.size() && words[at] != "rows"; ++at) {
    const size_t colon = words[at].find(':');
    dims.push_back(
        colon == std::string::npos
            ? OwnedDim{}
            : OwnedDim{words[at].substr(0, colon), &all.owners.at(words[at].substr(colon + 1))});
  }
  const Words* rows = at < words.size() ? &all.rows.at(words.at(at + 1)) : nullptr;
  ASSERT_EQ(dims.size(), tensor(shape, 0).shape.size());
  for (int64_t n = 0; n < kSizes; ++n) {
    const TensorSpec target = tensor(shape, n);
    for (int rank = 0; rank < sharding.mesh.world_size(); ++rank) {
      const Shard shard = shard_of(dims, target, n, rank);
      ASSERT_EQ(local_shape(sharding, target, rank), shard.shape) << n << " rank " << rank;
      ASSERT_EQ(held_ids(sharding, target, rank), shard.ids) << n << " rank " << rank;
      ASSERT_EQ(ids_of_runs(sharding, target, rank), shard.ids) << n << " rank " << rank;
      if (rows == nullptr) continue;
      const std::string& of_ranks = at_size(*rows, n);
      const char padded =
          of_ranks.size() == 1 ? of_ranks[0] : of_ranks.at(static_cast<size_t>(rank));
      if (padded == '-') continue;
      int64_t due = digit(padded);
      for (size_t d = 1; d < shard.shape.size(); ++d) due *= shard.shape[d];
      ASSERT_EQ(local_buffer(sharding, target, rank).padded_numel, due) << n << " rank " << rank;
    }
  }
}

TEST(RecordedCuts, EqualThoseOfDTensorAndFsdp2) {
  const Recording all = recorded();
  EXPECT_GE(all.torch.size(), 562U);
  for (const Words& words : all.torch) {
    SCOPED_TRACE(words[0] + " " + words[1] + " dim " + words[3] + " shape " + words[5]);
    expect_recorded(all, words);
    if (HasFailure()) return;
  }
}

TEST(RecordedCuts, EqualThoseOfZero3) {
  const Recording all = recorded();
  EXPECT_GE(all.zero3.size(), 27U);
  const TensorSpec scalar = tensor("", 0), ints = tensor("5", 0, DType::i64);
  for (const Words& words : all.zero3) {
    SCOPED_TRACE(words[1] + " ranks, " + words[2]);
    const int world = std::stoi(words[1]);
    for (int64_t n = 0; n < kSizes; ++n) {
      const TensorSpec target = tensor(words[2], n);
      const std::vector<const TensorSpec*> targets = {&target, &scalar, &ints};
      const Layout layout = zero3_layout(world, targets);
      const auto counts = numbers(words.at(static_cast<size_t>(3 + n)), ',');
      int64_t first = 0;
      for (int rank = 0; rank < world; ++rank) {
        std::vector<int64_t> due(static_cast<size_t>(counts.at(static_cast<size_t>(rank))));
        std::iota(due.begin(), due.end(), first);
        first += static_cast<int64_t>(due.size());
        ASSERT_EQ(held_ids(layout.sharding_of(0), target, rank), due);
        ASSERT_EQ(local_buffer(layout.sharding_of(0), target, rank).padded_numel, counts[0]);
        ASSERT_EQ(local_buffer(layout.sharding_of(1), scalar, rank).numel, 1);
        ASSERT_EQ(local_buffer(layout.sharding_of(2), ints, rank).numel, 5);
      }
    }
  }
}

// The tensors of `model` in record_cuts.py.
std::vector<TensorSpec> zero_model() {
  std::vector<TensorSpec> model = {tensor("", 0)};
  for (int64_t n = 0; n < kSizes; ++n) {
    model.push_back(tensor("n", n));
    model.push_back(tensor("n,3", n));
    model.push_back(tensor("3,n", n, DType::bf16));
    model.push_back(tensor("2,n,3", n, DType::f16));
    model.push_back(tensor("5,2,n", n));
    model.push_back(tensor("n,2", n, DType::i64));
  }
  model.push_back(tensor("", 0, DType::boolean));
  return model;
}

TEST(RecordedCuts, EqualThoseOfZero1And2) {
  const Recording all = recorded();
  EXPECT_GE(all.zero.size(), 54U);
  const std::vector<TensorSpec> model = zero_model();
  std::vector<const TensorSpec*> targets;
  for (const TensorSpec& target : model) targets.push_back(&target);
  for (const Words& words : all.zero) {  // zero STAGES RANKS ORDER DTYPE [order ...] held ...
    SCOPED_TRACE(words[1] + " " + words[2] + " " + words[3] + " " + words[4]);
    const int world = std::stoi(words[2]);
    const Layout layout = flat_layout("zero1", world, targets, words[3] == "round-robin");
    ASSERT_EQ(layout.flats.size(), 3U);
    const FlatGroup& flat = layout.flats[words[4] == "float32"    ? 0
                                         : words[4] == "bfloat16" ? 1
                                                                  : 2];
    std::vector<uint32_t> order, counts, numels;
    const auto begins = std::find(words.begin(), words.end(), "held");
    for (auto w = words.begin() + 6; w < begins; ++w) {
      order.push_back(static_cast<uint32_t>(std::stoul(*w)));
    }
    for (auto w = begins + 1; w != words.end(); ++w) {
      counts.push_back(static_cast<uint32_t>(std::stoul(*w)));
    }
    std::vector<uint32_t> ours;
    for (const uint32_t t : flat.targets) {
      if (numel_of(model[t].shape) > 0) ours.push_back(t);  // DeepSpeed drops the others
    }
    if (order.empty()) {
      EXPECT_TRUE(std::is_sorted(ours.begin(), ours.end()));
    } else {
      EXPECT_EQ(ours, order);
    }
    for (int rank = 0; rank < world; ++rank) {
      numels.push_back(static_cast<uint32_t>(local_buffer(flat, rank).numel));
    }
    EXPECT_EQ(numels, counts);
  }
}

}  // namespace
}  // namespace modicum
