#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "modicum/layout/layout.h"

namespace modicum {
namespace {

// The target with its dims permuted to `order`, and the sharding that gives each rank the same
// elements as before. (Not for a flattened sharding, which has no dims to permute.)
std::pair<TensorSpec, Sharding> reordered(const TensorSpec& target, const Sharding& sharding,
                                          std::span<const int> order) {
  std::pair<TensorSpec, Sharding> result(target, sharding);
  const size_t dims = target.shape.size();
  const auto refuse = [&] {
    fail(Category::usage, "the order does not list each dim of the tensor once",
         {.tensor = target.fqn,
          .expected = fmt::format("the {} dims from 0 on in any order", dims),
          .got = fmt::format("[{}]", fmt::join(order, ", "))});
  };
  if (order.size() != dims) refuse();
  std::vector<int> place_of(dims, -1);
  for (size_t place = 0; place < dims; ++place) {
    const auto dim = static_cast<size_t>(order[place]);
    if (dim >= dims || place_of[dim] >= 0) refuse();
    place_of[dim] = static_cast<int>(place);
    result.first.shape[place] = target.shape[dim];
  }
  for (Cut& cut : result.second.cuts) {
    const size_t dim = static_cast<size_t>(cut.dim) < dims ? static_cast<size_t>(cut.dim) : 0;
    if (dims > 0) cut.dim = place_of[dim];
  }
  return result;
}

}  // namespace

std::vector<ElementRun> runs_of(const Sharding& sharding, const TensorSpec& target, int rank,
                                std::span<const int> order) {
  const auto [new_target, new_sharding] = reordered(target, sharding, order);
  std::vector<std::pair<int64_t, ElementRun>> placed;  // place in the rank's memory, and run
  for_each_piece(new_sharding, new_target, rank, [&](const Box& piece) {
    for_each_runs(piece, [&](const Runs& runs) {
      MODICUM_ASSERT(runs.at_step == 1 || runs.length == 1);
      for (int64_t k = 0; k < runs.count; ++k) {
        placed.push_back(
            {runs.at + k * runs.at_stride, {runs.first + k * runs.stride, runs.length}});
      }
    });
  });
  // Pieces of packed parts can alternate in memory, so the runs must be sorted.
  std::sort(placed.begin(), placed.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<ElementRun> all;
  for (const auto& [at, run] : placed) {
    if (all.empty() || all.back().first + all.back().n != run.first) {
      all.push_back(run);
    } else {
      all.back().n += run.n;
    }
  }
  return all;
}

}  // namespace modicum
