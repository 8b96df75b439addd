// The reads that the leader of a node makes for all its ranks.
#include <algorithm>

#include "modicum/plan/inside.h"
#include "modicum/plan/plan.h"

namespace modicum {
namespace {

// The part of a stored tensor that one rank needs for a target: elements [first, end), gaps
// included.
struct Span {
  uint32_t stored = 0;
  int64_t first = 0;
  int64_t end = 0;
  int place = 0;  // the rank's index within its node
};

// The bytes of a read that one rank needs. `needed` is the rank's range of elements.
NodeRead::Request wanted_of(const StoredTensor& tensor, const NodeRead& read, const Chunk& needed) {
  if (needed.size() == 0) return {};
  const Extent extent = extent_of(tensor, needed.lo, needed.size());
  return {extent.begin - read.at.begin,
          read.scale.bytes() > 0 ? read.bytes() : extent.end - read.at.begin};
}

// The reads of targets, one at a time, for the ranks of a node.
class TargetReads {
 public:
  TargetReads(const Plan& plan, int rank, FunctionRef<void(const NodeRead&)> fn)
      : plan_(plan), node_(node_of(plan, rank)), fn_(fn) {
    wanted_.resize(static_cast<size_t>(node_.end - node_.first));
    needed_.resize(wanted_.size());
  }

  // Emits the reads for `target`.
  void read_target(uint32_t target) {
    target_ = target;
    spans_.clear();
    for (int r = node_.first; r < node_.end; ++r) {
      for_each_transfer_of(plan_, r, target, [&](const Transfer& t) {
        stretch_ = t;  // for the target and the dtypes; stretch_from sets the source and the run
        spans_.push_back({t.from, t.runs.first, t.runs.first + t.runs.span(), r - node_.first});
      });
    }
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) {
      return a.stored != b.stored ? a.stored < b.stored : a.first < b.first;
    });
    for (size_t i = 0; i < spans_.size();) i = stretch_from(i);
  }

 private:
  // Emits the stretch that begins with span `i`. The stretch is extended while the next span begins
  // less than a page after its end. Returns the index of the first span after the stretch.
  size_t stretch_from(size_t i) {
    const StoredTensor& tensor = plan_.manifest->tensors[spans_[i].stored];
    const auto page = static_cast<int64_t>(kPageBytes * 8) / bits_per_element(tensor.spec.dtype);
    const size_t begin = i;
    int64_t end = spans_[i].end;
    for (++i; i < spans_.size() && spans_[i].stored == spans_[begin].stored &&
              spans_[i].first < end + page;
         ++i) {
      end = std::max(end, spans_[i].end);
    }
    stretch_.from = spans_[begin].stored;
    stretch_.from_dtype = tensor.spec.dtype;
    for (int64_t at = spans_[begin].first; at < end;) {
      stretch_.runs = {.first = at, .length = end - at};
      cut_to_tile(stretch_);
      tile(tensor, std::span(spans_).subspan(begin, i - begin));
      at += stretch_.runs.length;
    }
    return i;
  }

  // If scales are staged too, the stretch shrinks by eighths, not to the largest size that fits.
  // Rows and shards have round sizes, so a tile then often ends with a shard and is sent to fewer
  // ranks (DeepSeek-V3 from FP8 to 8 ranks: 23 % less sent). Eight elements are whole bytes.
  void cut_to_tile(Transfer& stretch) const {
    int64_t& n = stretch.runs.length;
    const uint64_t tile_bytes = plan_.staging.tile_bytes;
    n = std::min(n, elements_within(stretch.from_dtype, tile_bytes));
    while (n > 8 && staged_bytes(plan_, stretch) > tile_bytes) {
      n = std::max<int64_t>(8, (n - n / 8) / 8 * 8);
    }
  }

  // Emits the read of `stretch_`.
  void tile(const StoredTensor& tensor, std::span<const Span> spans) {
    const int64_t first = stretch_.runs.first;
    const int64_t count = stretch_.runs.length;
    std::fill(needed_.begin(), needed_.end(), Chunk{});
    for (const Span& span : spans) {  // sorted by first element
      const int64_t from = std::max(first, span.first);
      const int64_t to = std::min(first + count, span.end);
      Chunk& needed = needed_[static_cast<size_t>(span.place)];
      if (from < to) needed = {needed.size() == 0 ? from : needed.lo, std::max(needed.hi, to)};
    }
    NodeRead read{target_,
                  stretch_.from,
                  first,
                  count,
                  extent_of(tensor, first, count),
                  scale_extent(plan_, stretch_),
                  {}};
    for (size_t r = 0; r < needed_.size(); ++r) wanted_[r] = wanted_of(tensor, read, needed_[r]);
    read.wanted = wanted_;
    fn_(read);
  }

  const Plan& plan_;
  const NodeRanks node_;
  FunctionRef<void(const NodeRead&)> fn_;
  uint32_t target_ = 0;
  Transfer stretch_;  // the next read, as one run with the dtypes of its transfers
  std::vector<Span> spans_;
  std::vector<Chunk> needed_;
  std::vector<NodeRead::Request> wanted_;
};

}  // namespace

void for_each_node_read_of(const Plan& plan, int rank, uint32_t target,
                           FunctionRef<void(const NodeRead&)> fn) {
  TargetReads(plan, rank, fn).read_target(target);
}

void for_each_node_read(const Plan& plan, int rank, FunctionRef<void(const NodeRead&)> fn) {
  checked_rank(rank, plan.ranks());
  TargetReads reads(plan, rank, fn);
  for (const uint32_t target : plan.order) reads.read_target(target);
}

void for_each_transfer_within(const Transfer& transfer, const NodeRead& read,
                              FunctionRef<void(const Transfer&)> fn) {
  if (transfer.from != read.stored) return;
  const Runs& r = transfer.runs;
  const int64_t lo = read.first;
  const int64_t hi = read.first + read.count;
  const auto emit = [&](int64_t k, int64_t runs, int64_t i, int64_t n) {
    if (runs > 0 && n > 0) fn(transfer.part(k, runs, i, n));
  };
  const auto cut_run = [&](int64_t k) {
    const int64_t begin = r.first + k * r.stride;
    const int64_t from = std::clamp<int64_t>(lo - begin, 0, r.length);
    const int64_t to = std::clamp<int64_t>(hi - begin, 0, r.length);
    emit(k, 1, from, to - from);
  };
  if (r.count == 1) return cut_run(0);
  // Runs [first, end) are wholly inside [lo, hi); one neighbour on each side may be cut:
  //
  //   run          0        1        2        3        4
  //             [-----]  [-----]  [-----]  [-----]  [-----]
  //                         |lo                       |hi
  //   emitted               [--]  [-----]  [-----]  [-]   first = 2, end = 4
  const int64_t after_lo = lo - r.first;
  const int64_t before_hi = hi - r.first - r.length;
  const int64_t first =
      std::clamp<int64_t>(after_lo <= 0 ? 0 : ceil_div(after_lo, r.stride), 0, r.count);
  const int64_t end =
      std::clamp<int64_t>(before_hi < 0 ? 0 : before_hi / r.stride + 1, first, r.count);
  if (first > 0) cut_run(first - 1);
  emit(first, end - first, 0, r.length);
  if (end < r.count) cut_run(end);
}

}  // namespace modicum
