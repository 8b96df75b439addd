// The elements that a rank holds, one by one.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "modicum/layout/layout.h"

namespace modicum {

// The row-major ids of the elements that `rank` holds, in local order. For FSDP2, in torch:
// chunk(arange(numel).reshape(shape), world, dim)[rank].flatten().
inline std::vector<int64_t> held_ids(const Sharding& sharding, const TensorSpec& target, int rank) {
  std::vector<int64_t> ids(static_cast<size_t>(local_buffer(sharding, target, rank).numel), -1);
  for_each_piece(sharding, target, rank, [&](const Box& piece) {
    for_each_runs(piece, [&](const Runs& runs) {
      for (int64_t k = 0; k < runs.count; ++k) {
        for (int64_t i = 0; i < runs.length; ++i) {
          auto& id = ids.at(static_cast<size_t>(runs.at + k * runs.at_stride + i * runs.at_step));
          if (id != -1) ADD_FAILURE() << "an element is placed twice";
          id = runs.first + k * runs.stride + i;
        }
      }
    });
  });
  return ids;
}

}  // namespace modicum
