// What one rank of a node reads for all of them.
#include <algorithm>

#include "modicum/plan/plan.h"

namespace modicum {
namespace {

// Ranks [first, end) of the node that `rank` is on.
std::pair<int, int> node_of(const Plan& plan, int rank) {
  const int per_node = plan.options.ranks_per_node > 0 ? plan.options.ranks_per_node : plan.ranks();
  const int first = rank / per_node * per_node;
  return {first, std::min(plan.ranks(), first + per_node)};
}

// The part of `t` whose stored elements lie in [lo, hi): whole runs together, a cut one by itself.
void clip(const Transfer& t, int64_t lo, int64_t hi,
          const std::function<void(const Transfer&)>& fn) {
  const Runs& r = t.runs;
  const auto emit = [&](int64_t k, int64_t runs, int64_t i, int64_t run) {
    if (runs <= 0 || run <= 0) return;
    Transfer part = t;
    part.runs.first = r.first + k * r.stride + i;
    part.runs.at = r.at + k * r.at_stride + i * r.at_step;
    part.runs.runs = runs;
    part.runs.run = run;
    fn(part);
  };
  const auto cut_run = [&](int64_t k) {
    const int64_t begin = r.first + k * r.stride;
    const int64_t from = std::clamp<int64_t>(lo - begin, 0, r.run);
    const int64_t to = std::clamp<int64_t>(hi - begin, 0, r.run);
    emit(k, 1, from, to - from);
  };
  if (r.runs == 1) return cut_run(0);
  // Runs that lie within wholly; those beside them may do so in part.
  const int64_t after_lo = lo - r.first;
  const int64_t before_hi = hi - r.first - r.run;
  const int64_t first =
      std::clamp<int64_t>(after_lo <= 0 ? 0 : ceil_div(after_lo, r.stride), 0, r.runs);
  const int64_t end =
      std::clamp<int64_t>(before_hi < 0 ? 0 : before_hi / r.stride + 1, first, r.runs);
  if (first > 0) cut_run(first - 1);
  emit(first, end - first, 0, r.run);
  if (end < r.runs && end >= first) cut_run(end);
}

using Elements = std::pair<int64_t, int64_t>;  // half open

// First and last element of [lo, hi) of a stored tensor that a rank needs.
Elements needed_within(const Plan& plan, int rank, uint32_t stored, int64_t lo, int64_t hi) {
  int64_t first = hi, end = lo;
  for_each_transfer_from(plan, rank, stored, [&](const Transfer& t) {
    clip(t, lo, hi, [&](const Transfer& part) {
      const Runs& r = part.runs;
      first = std::min(first, r.first);
      end = std::max(end, r.first + (r.runs - 1) * r.stride + r.run);
    });
  });
  return {first, std::max(first, end)};
}

NodeRead::Wanted wanted_of(const Stored& tensor, const NodeRead& read, const Elements& needed) {
  if (needed.first == needed.second) return {};
  const Extent extent = extent_of(tensor, needed.first, needed.second - needed.first);
  return {extent.begin - read.at.begin,
          read.scale.bytes() > 0 ? read.bytes() : extent.end - read.at.begin};
}

// As many elements from `first` on as fit into a slot with their scales.
int64_t fitting(const Plan& plan, const Stored& tensor, Transfer& stretch, int64_t first) {
  const auto bits = bits_per_element(tensor.spec.dtype);
  const auto whole_bytes = [](int64_t n) { return std::max<int64_t>(8, n / 8 * 8); };
  const int64_t left = numel_of(tensor.spec.shape) - first;
  int64_t n = std::min(left, whole_bytes(static_cast<int64_t>(plan.staging.tile_bytes) * 8 / bits));
  stretch.runs.first = first;
  for (;;) {
    stretch.runs.run = n;
    const uint64_t bytes = bytes_of(tensor.spec.dtype, n) + scale_extent(plan, stretch).bytes();
    if (bytes <= plan.staging.tile_bytes || n <= 8) return n;
    n = whole_bytes(n - n / 8);
  }
}

}  // namespace

std::vector<int> exchange_group(const Plan& plan, int rank) {
  const auto between = [](int first, int end) {
    std::vector<int> ranks;
    for (int r = first; r < end; ++r) ranks.push_back(r);
    return ranks;
  };
  switch (plan.strategy().reader) {
    case Reader::every_rank: return {rank};
    case Reader::rank_0: return between(0, plan.ranks());
    case Reader::node_leader: return between(node_of(plan, rank).first, node_of(plan, rank).second);
    case Reader::replicas: return replicas_of(plan.layout, rank);
  }
  MODICUM_ASSERT(false);
}

void for_each_node_read(const Plan& plan, int rank,
                        const std::function<void(const NodeRead&)>& fn) {
  const auto [begin, end] = node_of(plan, rank);
  std::vector<Elements> needed(static_cast<size_t>(end - begin));
  std::vector<NodeRead::Wanted> wanted(needed.size());
  for (uint32_t s = 0; s < plan.manifest->tensors.size(); ++s) {
    if (!gives_elements(plan, s)) continue;
    const Stored& tensor = plan.manifest->tensors[s];
    Transfer stretch;
    stretch.from = s;
    stretch.from_dtype = stretch.to_dtype = tensor.spec.dtype;
    if (scale_beside(plan, s)) stretch.to_dtype = DType::f32;
    const int64_t numel = numel_of(tensor.spec.shape);
    for (int64_t at = 0; at < numel;) {
      const int64_t n = fitting(plan, tensor, stretch, at);
      int64_t lo = at + n, hi = at;
      for (int r = begin; r < end; ++r) {
        auto& of_rank = needed[static_cast<size_t>(r - begin)];
        of_rank = needed_within(plan, r, s, at, at + n);
        if (of_rank.first == of_rank.second) continue;
        lo = std::min(lo, of_rank.first);
        hi = std::max(hi, of_rank.second);
      }
      if (lo < hi) {
        stretch.runs.first = lo;
        stretch.runs.run = hi - lo;
        NodeRead read{s, lo, hi - lo, extent_of(tensor, lo, hi - lo), scale_extent(plan, stretch),
                      {}};
        for (size_t r = 0; r < needed.size(); ++r) wanted[r] = wanted_of(tensor, read, needed[r]);
        read.wanted = wanted;
        fn(read);
      }
      at += n;
    }
  }
}

void for_each_transfer_within(const Plan& plan, int rank, const NodeRead& read,
                              const std::function<void(const Transfer&)>& fn) {
  for_each_transfer_from(plan, rank, read.stored, [&](const Transfer& transfer) {
    clip(transfer, read.first, read.first + read.count, fn);
  });
}

}  // namespace modicum
