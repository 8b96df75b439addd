// The writes of a save: the transfers of the load that would read the saved files, in reverse.
//
//   targets in the plan's order    t0   t1   t2   t3        file 0: t0 t1    file 1: t2 t3
//   rank 0 of 2 walks              t0   t1   t2   t3
//   rank 1 of 2 walks              t2   t3   t0   t1
//
// Targets with divided rows (Rows) have a walk of their own, in which every rank begins at the
// first file.
#include <algorithm>

#include "modicum/plan/inside.h"
#include "modicum/plan/plan.h"

namespace modicum {
namespace {

// A transfer of at most this size that several replicas hold is written by one of them. A larger
// one is divided among them: by runs if it has at least one per replica, else within each run.
constexpr uint64_t kWholeBytes = 256 * kKiB;
// Runs are divided in units of this many elements, which are whole bytes.
constexpr int64_t kShareUnit = 4096;
// Tiles of at most this size are joined with their neighbours. Also, rows are divided (Rows) if a
// rank's run in each is shorter than this.
constexpr uint64_t kSmallBytes = 64 * kKiB;
// The most tiles that are joined to one write.
constexpr size_t kGroupRows = 64;

ReplicaPlace place_among_replicas(const Plan& plan, uint32_t target, int rank) {
  const uint32_t holder = holder_of(plan, target);
  if (plan.layout.is_flat(holder)) return {};  // each element is held once
  return replica_place(plan.layout.sharding_of(holder), plan.recipe->targets[holder].spec, rank);
}

bool is_from_first(const Plan& plan, uint32_t target) {
  const std::vector<bool>& from_first = plan.options.from_first;
  return !from_first.empty() && from_first[holder_of(plan, target)];
}

// Calls `fn` with the part of a transfer that this replica writes.
void share(const Transfer& t, const ReplicaPlace& place, FunctionRef<void(const Transfer&)> fn) {
  const Runs& runs = t.runs;
  const auto emit = [&](const Transfer& part) {
    if (part.numel() > 0) fn(part);
  };
  if (place.count == 1) return emit(t);
  if (bytes_of(t.from_dtype, runs.numel()) <= kWholeBytes) {
    // By tensor, so that the small tensors are spread over the replicas.
    const auto writer = t.from % static_cast<uint32_t>(place.count);
    if (writer == static_cast<uint32_t>(place.index)) emit(t);
    return;
  }
  if (runs.count >= place.count) {
    const Chunk mine = chunk_of(runs.count, place.count, place.index);
    return emit(t.part(mine.lo, mine.size(), 0, runs.length));
  }
  const int64_t units = ceil_div(runs.length, kShareUnit);
  const Chunk mine = chunk_of(units, place.count, place.index);
  const int64_t begin = std::min(mine.lo * kShareUnit, runs.length);
  const int64_t end = std::min(mine.hi * kShareUnit, runs.length);
  emit(t.part(0, runs.count, begin, end - begin));
}

// Whether the rank holds a short run in each of several rows of a stored tensor.
bool has_divided_rows(const Plan& plan, int rank, uint32_t target) {
  bool found = false;
  for_each_transfer_of(plan, rank, target, [&](const Transfer& t) {
    found |= t.runs.count > 1 && bytes_of(t.from_dtype, t.runs.length) < kSmallBytes;
  });
  return found;
}

// Divides runs into tiles, and joins small neighbouring tiles to one write.
class Joiner {
 public:
  Joiner(const Plan& plan, FunctionRef<void(const Write&)> write) : plan_(plan), write_(write) {}

  void add(const Transfer& t) {
    for (int64_t k = 0; k < t.runs.count; ++k) add_run(t.part(k, 1, 0, t.runs.length));
  }

  void flush() {
    if (rows_ == 0) return;
    write_({at_, rows_ == 1 && is_direct(group_[0]), std::span(group_).first(rows_)});
    rows_ = 0;
  }

 private:
  bool is_direct(const Transfer& t) const {
    return destination_of(plan_, t.buffer) != Destination::copy && !t.casts() &&
           (t.runs.at_step == 1 || t.runs.length == 1);
  }

  void add_run(const Transfer& t) {
    const uint64_t most = is_direct(t) ? kMaxReadBytes : plan_.staging.tile_bytes;
    for (int64_t i = 0; i < t.runs.length;) {
      const int64_t n = std::min(elements_within(t.from_dtype, most), t.runs.length - i);
      add_tile(t.part(0, 1, i, n));
      i += n;
    }
  }

  void add_tile(const Transfer& tile) {
    const Extent at = span_of(plan_, tile);
    const bool joins = rows_ > 0 && rows_ < kGroupRows && at.file == at_.file &&
                       at.begin == at_.end && at.bytes() <= kSmallBytes &&
                       at.end - at_.begin <= plan_.staging.tile_bytes;
    if (!joins) flush();
    at_ = rows_ == 0 ? at : Extent{at.file, at_.begin, at.end};
    group_[rows_++] = tile;
    if (at.bytes() > kSmallBytes) flush();
  }

  const Plan& plan_;
  FunctionRef<void(const Write&)> write_;
  std::array<Transfer, kGroupRows> group_;
  size_t rows_ = 0;
  Extent at_;
};

}  // namespace

// Examining rank 0 is enough for tensors that are cut along a dim: it has a part of each. In a flat
// group other ranks may have divided rows and rank 0 none. Then no rows are gathered, and every
// rank writes its own.
bool gathers(const Plan& plan) {
  if (std::min(ranks_per_node(plan), plan.ranks()) < 2) return false;
  return std::any_of(plan.order.begin(), plan.order.end(),
                     [&](uint32_t target) { return has_divided_rows(plan, 0, target); });
}

void for_each_write(const Plan& plan, int rank, Rows which, std::span<Transfer> table,
                    FunctionRef<void(const Write&)> fn) {
  MODICUM_ASSERT(table.size() >= kReadTableRows);
  const bool are_divided = which == Rows::divided;
  Joiner joiner(plan, fn);
  size_t rows = 0;
  const auto before = [](const Transfer& a, const Transfer& b) {
    return a.from != b.from ? a.from < b.from : a.runs.first < b.runs.first;
  };
  const auto flush = [&] {
    // Stored tensors are numbered in file order, so this sorts by file offset.
    const auto batch = table.first(rows);
    std::sort(batch.begin(), batch.end(), before);
    for (const Transfer& transfer : batch) joiner.add(transfer);
    joiner.flush();
    rows = 0;
  };
  const size_t targets = plan.order.size();
  const size_t begin =
      are_divided ? 0 : targets * static_cast<size_t>(rank) / static_cast<size_t>(plan.ranks());
  for (size_t i = 0; i < targets; ++i) {
    if (begin > 0 && i == targets - begin) flush();  // back to the first file
    const uint32_t target = plan.order[(begin + i) % targets];
    if (has_divided_rows(plan, rank, target) != are_divided) continue;
    ReplicaPlace place = place_among_replicas(plan, target, rank);
    if (is_from_first(plan, target)) {
      if (place.index > 0) continue;
      place.count = 1;
    }
    for_each_transfer_of(plan, rank, target, [&](const Transfer& transfer) {
      share(transfer, place, [&](const Transfer& mine) {
        table[rows++] = mine;
        if (rows == kReadTableRows) flush();
      });
    });
  }
  flush();
}

}  // namespace modicum
