// What one rank of a node reads for all of them.
#include <algorithm>

#include "modicum/plan/inside.h"
#include "modicum/plan/plan.h"

namespace modicum {
namespace {

// The part of `t` whose stored elements lie in [lo, hi): whole runs together, a cut one by itself.
void clip(const Transfer& t, int64_t lo, int64_t hi, FunctionRef<void(const Transfer&)> fn) {
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

// What one rank needs of a stored tensor for a target: elements [first, end), perhaps with gaps.
struct Span {
  uint32_t stored = 0;
  int64_t first = 0;
  int64_t end = 0;
  int place = 0;  // of the rank on its node
};

struct Elements {
  int64_t first = INT64_MAX;
  int64_t end = 0;

  void add(int64_t from, int64_t to) noexcept {
    first = std::min(first, from);
    end = std::max(end, to);
  }
};

NodeRead::Wanted wanted_of(const Stored& tensor, const NodeRead& read, const Elements& needed) {
  if (needed.first >= needed.end) return {};
  const Extent extent = extent_of(tensor, needed.first, needed.end - needed.first);
  return {extent.begin - read.at.begin,
          read.scale.bytes() > 0 ? read.bytes() : extent.end - read.at.begin};
}

// As many elements from `first` on as fit into a slot with their scales.
int64_t fitting(const Plan& plan, const Stored& tensor, Transfer& stretch, int64_t first,
                int64_t end) {
  const auto bits = bits_per_element(tensor.spec.dtype);
  const auto whole_bytes = [](int64_t n) { return std::max<int64_t>(8, n / 8 * 8); };
  int64_t n =
      std::min(end - first, whole_bytes(static_cast<int64_t>(plan.staging.tile_bytes) * 8 / bits));
  stretch.runs.first = first;
  for (;;) {
    stretch.runs.run = n;
    const uint64_t bytes = bytes_of(tensor.spec.dtype, n) + scale_extent(plan, stretch).bytes();
    if (bytes <= plan.staging.tile_bytes || n <= 8) return n;
    n = whole_bytes(n - n / 8);
  }
}

// The reads of one target for the ranks of a node.
class TargetReads {
 public:
  TargetReads(const Plan& plan, int rank, FunctionRef<void(const NodeRead&)> fn)
      : plan_(plan), node_(node_of(plan, rank)), fn_(fn) {
    wanted_.resize(static_cast<size_t>(node_.end - node_.first));
    needed_.resize(wanted_.size());
  }

  void of(uint32_t target) {
    target_ = target;
    spans_.clear();
    for (int r = node_.first; r < node_.end; ++r) {
      for_each_transfer_of(plan_, r, target, [&](const Transfer& t) {
        stretch_ = t;
        const int64_t end = t.runs.first + (t.runs.runs - 1) * t.runs.stride + t.runs.run;
        spans_.push_back({t.from, t.runs.first, end, r - node_.first});
      });
    }
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) {
      return a.stored != b.stored ? a.stored < b.stored : a.first < b.first;
    });
    for (size_t i = 0; i < spans_.size();) i = stretch_from(i);
  }

 private:
  // The stretch that begins with span `i`: all that follow it without a gap of a page. Returns the
  // first span behind it.
  size_t stretch_from(size_t i) {
    const Stored& tensor = plan_.manifest->tensors[spans_[i].stored];
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
    stretch_.runs = {};
    for (int64_t at = spans_[begin].first; at < end;) {
      const int64_t n = fitting(plan_, tensor, stretch_, at, end);
      tile(tensor, std::span(spans_).subspan(begin, i - begin), at, n);
      at += n;
    }
    return i;
  }

  void tile(const Stored& tensor, std::span<const Span> spans, int64_t first, int64_t count) {
    std::fill(needed_.begin(), needed_.end(), Elements{});
    for (const Span& span : spans) {
      const int64_t from = std::max(first, span.first);
      const int64_t to = std::min(first + count, span.end);
      if (from < to) needed_[static_cast<size_t>(span.place)].add(from, to);
    }
    stretch_.runs.first = first;
    stretch_.runs.run = count;
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
  Transfer stretch_;  // as its transfers, but for the runs
  std::vector<Span> spans_;
  std::vector<Elements> needed_;
  std::vector<NodeRead::Wanted> wanted_;
};

}  // namespace

void for_each_node_read_of(const Plan& plan, int rank, uint32_t target,
                           FunctionRef<void(const NodeRead&)> fn) {
  TargetReads(plan, rank, fn).of(target);
}

void for_each_node_read(const Plan& plan, int rank, FunctionRef<void(const NodeRead&)> fn) {
  TargetReads reads(plan, rank, fn);
  for (const uint32_t target : plan.order) reads.of(target);
}

void for_each_transfer_within(const Transfer& transfer, const NodeRead& read,
                              FunctionRef<void(const Transfer&)> fn) {
  if (transfer.from != read.stored) return;
  clip(transfer, read.first, read.first + read.count, fn);
}

}  // namespace modicum
