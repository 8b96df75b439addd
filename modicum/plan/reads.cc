// From transfers to reads: sorted by file offset in batches, cut into tiles, neighbours coalesced.
#include <algorithm>

#include "modicum/plan/plan.h"

namespace modicum {
namespace {

// A run of a strided transfer is read on its own from here on: below, a call costs more than the
// bytes between the runs do.
constexpr uint64_t kOwnReadBytes = 2 * kKiB;
// Tiles up to here may be read together with their neighbours...
constexpr uint64_t kSmallBytes = 64 * kKiB;
// ...through gaps that make at most this part of the whole: over-read stays below 1.6 %.
constexpr uint64_t kUsefulPerGap = 64;
constexpr size_t kGroupRows = 64;

// Runs [k, k + runs) of a transfer, or part [i, i + run) of its only run.
Transfer some_runs(const Transfer& of, int64_t k, int64_t runs) {
  Transfer part = of;
  part.runs.first += k * of.runs.stride;
  part.runs.at += k * of.runs.at_stride;
  part.runs.runs = runs;
  return part;
}
Transfer part_of_run(const Transfer& of, int64_t i, int64_t run) {
  Transfer part = of;
  part.runs.first += i;
  part.runs.at += i * of.runs.at_step;
  part.runs.run = run;
  return part;
}

// First to last byte that a transfer's elements stand in.
Extent span_of(const Plan& plan, const Transfer& t) {
  const int64_t count = (t.runs.runs - 1) * t.runs.stride + t.runs.run;
  return extent_of(plan.manifest->tensors[t.from], t.runs.first, count);
}

// Room in staging for what a tile needs: its span, and the scales of its codes.
uint64_t staged_bytes(const Plan& plan, const Transfer& tile) {
  return span_of(plan, tile).bytes() + scale_extent(plan, tile).bytes();
}

// As many of the `most` first steps (runs, or elements of a run) as fit into a tile with the scales
// of their codes: `tile(n)` are n of them, a further one takes `step_bytes` more. At least one.
template <typename Tile>
int64_t fitting(const Plan& plan, int64_t most, uint64_t step_bytes, const Tile& tile) {
  int64_t n = most;
  while (n > 1) {
    const uint64_t bytes = staged_bytes(plan, tile(n));
    if (bytes <= plan.staging.tile_bytes) break;
    const uint64_t over = (bytes - plan.staging.tile_bytes + step_bytes - 1) / step_bytes;
    // Fewer steps need no more scales: so many less will do, if that leaves any.
    n = over < static_cast<uint64_t>(n) ? n - static_cast<int64_t>(over) : n / 2;
  }
  return n;
}

// Both, where they are of one file; the other, where one is empty.
Extent joined(const Extent& a, const Extent& b) {
  if (a.bytes() == 0) return b;
  if (b.bytes() == 0) return a;
  return {a.file, std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

// Collects neighbouring small tiles and hands on one read for them.
class Coalescer {
 public:
  Coalescer(const Plan& plan, FunctionRef<void(const Read&)> read) : plan_(plan), read_(read) {}

  void add(const Transfer& tile) {
    const Extent span = span_of(plan_, tile);
    const Extent scale = scale_extent(plan_, tile);
    if (!joins(tile, span, scale)) {
      flush();
      scale_ = {};
      begin_ = span.begin;
      end_ = span.begin;
      file_ = span.file;
      useful_ = 0;
    }
    end_ = std::max(end_, span.end);
    scale_ = joined(scale_, scale);
    useful_ += span.bytes();
    group_[rows_++] = tile;
    if (span.bytes() > kSmallBytes) flush();
  }

  void flush() {
    if (rows_ == 0) return;
    const bool direct = rows_ == 1 && is_direct(plan_, group_[0]);
    read_({file_, begin_, end_, direct, scale_, std::span(group_).first(rows_)});
    rows_ = 0;
  }

  // Elements that may be read straight to where they belong.
  static bool is_direct(const Plan& plan, const Transfer& t) {
    return !plan.staging.exchanges && destination_of(plan, t.buffer) != Destination::discard &&
           !t.casts() && !t.compared && t.runs.runs == 1 &&
           (t.runs.at_step == 1 || t.runs.run == 1);
  }

 private:
  bool joins(const Transfer& tile, const Extent& span, const Extent& scale) const {
    if (rows_ == 0 || rows_ == kGroupRows || span.file != file_ || span.begin < begin_)
      return false;
    if (span.bytes() > kSmallBytes) return false;
    // Scales are read as one stretch, and so for codes of one tensor.
    if ((scale_.bytes() == 0) != (scale.bytes() == 0)) return false;
    if (scale.bytes() > 0 && tile.from != group_[0].from) return false;
    const uint64_t staged = std::max(end_, span.end) - begin_ + joined(scale_, scale).bytes();
    if (staged > plan_.staging.tile_bytes) return false;
    const uint64_t gaps = std::max(end_, span.begin) - begin_ - std::min(useful_, end_ - begin_);
    return gaps * kUsefulPerGap <= useful_ + span.bytes();
  }

  const Plan& plan_;
  FunctionRef<void(const Read&)> read_;
  std::array<Transfer, kGroupRows> group_;
  size_t rows_ = 0;
  uint32_t file_ = 0;
  uint64_t begin_ = 0;
  uint64_t end_ = 0;
  uint64_t useful_ = 0;
  Extent scale_;
};

class Tiler {
 public:
  Tiler(const Plan& plan, Coalescer& out) : plan_(plan), out_(out) {}

  void add(const Transfer& t) {
    if (t.runs.runs == 1) return add_run(t);
    const Stored& stored = plan_.manifest->tensors[t.from];
    const uint64_t run_bytes = extent_of(stored, t.runs.first, t.runs.run).bytes();
    const uint64_t stride_bytes = bytes_of(stored.spec.dtype, t.runs.stride);
    // A gap within one page is read by the device in any case.
    if (run_bytes >= kOwnReadBytes || stride_bytes - run_bytes >= kPageBytes) {
      for (int64_t k = 0; k < t.runs.runs; ++k) add_run(some_runs(t, k, 1));
      return;
    }
    const auto rows =
        static_cast<int64_t>((plan_.staging.tile_bytes - run_bytes) / stride_bytes) + 1;
    for (int64_t k = 0; k < t.runs.runs;) {
      const auto some = [&](int64_t n) { return some_runs(t, k, n); };
      const int64_t n = fitting(plan_, std::min(rows, t.runs.runs - k), stride_bytes, some);
      if (n == 1) {
        add_run(some(1));
      } else {
        out_.add(some(n));
      }
      k += n;
    }
  }

 private:
  void add_run(const Transfer& t) {
    const uint64_t most =
        Coalescer::is_direct(plan_, t) ? kMostReadBytes : plan_.staging.tile_bytes;
    // Whole bytes for every dtype: eight elements are.
    const auto bits = static_cast<uint64_t>(bits_per_element(t.from_dtype));
    const auto elements = static_cast<int64_t>(most * 8 / bits / 8 * 8);
    for (int64_t i = 0; i < t.runs.run;) {
      const auto part = [&](int64_t n) { return part_of_run(t, i, n); };
      int64_t n = std::min(elements, t.runs.run - i);
      if (t.dequantises()) n = fitting(plan_, n, 1, part);
      out_.add(part(n));
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
  const auto before = [](const Transfer& a, const Transfer& b) {
    return a.from != b.from ? a.from < b.from : a.runs.first < b.runs.first;
  };
  const auto flush = [&] {
    // Stored tensors are numbered in file order, so this is the order of their bytes.
    const auto batch = table.first(rows);
    if (!std::is_sorted(batch.begin(), batch.end(), before)) {
      std::sort(batch.begin(), batch.end(), before);
    }
    Coalescer coalescer(plan, fn);
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
