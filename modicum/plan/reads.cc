// From transfers to reads: sorted by file offset in batches, cut into tiles, neighbours coalesced.
//
//   transfers of one rank      [--a--]      [b] [c]           [------------d------------]
//   cut into tiles             [--a--]      [b] [c]           [---d1---][---d2---][-d3-]
//   reads (small gap closed)   [--a--]      [--bc-]           [---d1---][---d2---][-d3-]
#include <algorithm>

#include "modicum/plan/inside.h"
#include "modicum/plan/plan.h"

namespace modicum {
namespace {

// Runs of a strided transfer that are at least this long are read one by one. For shorter runs with
// gaps of less than a page, a system call costs more than reading the gaps.
constexpr uint64_t kOwnReadBytes = 2 * kKiB;
// Tiles up to this size may be read together with their neighbours.
constexpr uint64_t kSmallBytes = 64 * kKiB;
// Gaps between such tiles are at most 1/64 of the tiles' bytes: joining them reads at most 1.6 %
// more.
constexpr uint64_t kUsefulPerGap = 64;
// The most tiles in one read.
constexpr size_t kGroupRows = 64;
// The shortest read that may go around the page cache: read-ahead makes shorter ones faster, and
// they share more of their pages with the neighbours.
constexpr uint64_t kOnceBytes = 256 * kKiB;

// The smallest extent that contains two extents of one file. An empty extent is ignored.
Extent joined(const Extent& a, const Extent& b) {
  if (a.bytes() == 0) return b;
  if (b.bytes() == 0) return a;
  return {a.file, std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

// Whether other ranks of the node read the same elements of a target as `rank`.
class Replicas {
 public:
  Replicas(const Plan& plan, int rank) : plan_(plan) {
    const NodeRanks node = node_of(plan, rank);
    for (const Sharding& sharding : plan.layout.kinds) {
      const std::vector<int> ranks = replicas_of(sharding, rank);
      read_.push_back(std::any_of(ranks.begin(), ranks.end(), [&](int other) {
        return other != rank && node.first <= other && other < node.end;
      }));
    }
  }
  bool read_same(uint32_t target) const {
    const Layout& layout = plan_.layout;
    if (layout.is_flat(target)) return false;
    return read_[layout.kind_of.empty() ? 0 : layout.kind_of[target]];
  }

 private:
  const Plan& plan_;
  std::vector<bool> read_;  // by kind
};

// Collects neighbouring small tiles and emits one read for them.
class Coalescer {
 public:
  Coalescer(const Plan& plan, const Replicas& replicas, FunctionRef<void(const Read&)> read)
      : plan_(plan), replicas_(replicas), read_(read) {}

  void add(const Transfer& tile) {
    const Extent span = span_of(plan_, tile);
    const Extent scale = scale_extent(plan_, tile);
    if (!joins(tile, span, scale)) flush();
    at_ = joined(at_, span);
    scale_ = joined(scale_, scale);
    useful_ += span.bytes();
    group_[rows_++] = tile;
    if (span.bytes() > kSmallBytes) flush();
  }

  void flush() {
    if (rows_ == 0) return;
    const bool direct = rows_ == 1 && is_direct(plan_, group_[0]);
    read_({at_, direct, is_read_once(), scale_, std::span(group_).first(rows_)});
    at_ = scale_ = {};
    useful_ = 0;
    rows_ = 0;
  }

  // Whether a transfer may be read straight into its local buffer.
  static bool is_direct(const Plan& plan, const Transfer& t) {
    return !plan.staging.exchanges && destination_of(plan, t.buffer) != Destination::copy &&
           !t.casts() && !t.compared && t.runs.count == 1 &&
           (t.runs.at_step == 1 || t.runs.length == 1);
  }

 private:
  bool is_read_once() const {
    return rows_ == 1 && group_[0].runs.count == 1 && at_.bytes() >= kOnceBytes &&
           !replicas_.read_same(group_[0].target);
  }

  bool joins(const Transfer& tile, const Extent& span, const Extent& scale) const {
    if (rows_ == 0 || rows_ == kGroupRows || span.file != at_.file || span.begin < at_.begin)
      return false;
    if (span.bytes() > kSmallBytes) return false;
    // A read has one extent of scales, so all its codes must be from one tensor.
    if ((scale_.bytes() == 0) != (scale.bytes() == 0)) return false;
    if (scale.bytes() > 0 && tile.from != group_[0].from) return false;
    const uint64_t staged = joined(at_, span).bytes() + joined(scale_, scale).bytes();
    if (staged > plan_.staging.tile_bytes) return false;
    // The bytes between at_.begin and the new tile that no tile needs. Tiles may overlap, so
    // `useful_` may exceed the extent.
    const uint64_t gaps =
        std::max(at_.end, span.begin) - at_.begin - std::min(useful_, at_.bytes());
    return gaps * kUsefulPerGap <= useful_ + span.bytes();
  }

  const Plan& plan_;
  const Replicas& replicas_;
  FunctionRef<void(const Read&)> read_;
  std::array<Transfer, kGroupRows> group_;
  size_t rows_ = 0;
  Extent at_;
  Extent scale_;
  uint64_t useful_ = 0;
};

// Cuts transfers into tiles for the Coalescer.
class Tiler {
 public:
  Tiler(const Plan& plan, Coalescer& out) : plan_(plan), out_(out) {}

  void add(const Transfer& t) {
    if (t.runs.count == 1) return add_run(t);
    const StoredTensor& stored = plan_.manifest->tensors[t.from];
    const uint64_t run_bytes = extent_of(stored, t.runs.first, t.runs.length).bytes();
    const uint64_t stride_bytes = bytes_of(stored.spec.dtype, t.runs.stride);
    // Storage reads whole pages anyway, so a gap within a page costs nothing.
    if (run_bytes >= kOwnReadBytes || stride_bytes - run_bytes >= kPageBytes) {
      for (int64_t k = 0; k < t.runs.count; ++k) add_run(t.part(k, 1, 0, t.runs.length));
      return;
    }
    for (int64_t k = 0; k < t.runs.count;) {
      const Transfer rest = t.part(k, t.runs.count - k, 0, t.runs.length);
      const int64_t n = runs_that_fit(plan_, rest);
      if (n == 1) {
        add_run(rest.part(0, 1, 0, t.runs.length));
      } else {
        out_.add(rest.part(0, n, 0, t.runs.length));
      }
      k += n;
    }
  }

 private:
  void add_run(const Transfer& t) {
    const uint64_t most = Coalescer::is_direct(plan_, t) ? kMaxReadBytes : plan_.staging.tile_bytes;
    for (int64_t i = 0; i < t.runs.length;) {
      const Transfer rest = t.part(0, 1, i, t.runs.length - i);
      const int64_t n = elements_that_fit(plan_, rest, most);
      out_.add(rest.part(0, 1, 0, n));
      i += n;
    }
  }

  const Plan& plan_;
  Coalescer& out_;
};

}  // namespace

void for_each_read(const Plan& plan, int rank, std::span<Transfer> table,
                   FunctionRef<void(const Read&)> fn) {
  MODICUM_ASSERT(table.size() >= kReadTableRows);
  size_t rows = 0;
  const Replicas replicas(plan, rank);
  const auto before = [](const Transfer& a, const Transfer& b) {
    return a.from != b.from ? a.from < b.from : a.runs.first < b.runs.first;
  };
  const auto flush = [&] {
    // Stored tensors are numbered in file order, so this sorts by file offset.
    const auto batch = table.first(rows);
    if (!std::is_sorted(batch.begin(), batch.end(), before)) {
      std::sort(batch.begin(), batch.end(), before);
    }
    Coalescer coalescer(plan, replicas, fn);
    Tiler tiler(plan, coalescer);
    for (const Transfer& transfer : batch) tiler.add(transfer);
    coalescer.flush();
    rows = 0;
  };
  for_each_stored_transfer(plan, rank, [&](const Transfer& transfer) {
    table[rows++] = transfer;
    if (rows == kReadTableRows) flush();
  });
  flush();
}

}  // namespace modicum
