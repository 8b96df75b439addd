// The arrival of gradients. The norm of a bucket is computed when its last element arrives.
#include <fmt/format.h>

#include <atomic>
#include <iterator>

#include "modicum/optim/adamw.h"
#include "modicum/optim/arriving.h"
#include "modicum/optim/shard_map.h"

namespace modicum {

// Merges [begin, end) with the intervals that it touches.
bool ArrivedRanges::add(int64_t begin, int64_t end) {
  auto next = end_of_.lower_bound(begin);
  if (next != end_of_.end() && next->first < end) return false;
  if (next != end_of_.begin() && std::prev(next)->second > begin) return false;
  count_ += end - begin;
  if (next != end_of_.end() && next->first == end) {
    end = next->second;
    next = end_of_.erase(next);
  }
  if (next != end_of_.begin() && std::prev(next)->second == begin) {
    std::prev(next)->second = end;
  } else {
    end_of_.emplace_hint(next, begin, end);
  }
  return true;
}

// The table of buckets follows the gradients in their arena, in the order of the shards.
std::span<Bucket> AdamW::buckets(size_t shard) const noexcept {
  const std::span<std::byte> arena = arenas_[static_cast<size_t>(Plane::grad)].bytes();
  auto* const table = reinterpret_cast<Bucket*>(arena.data() + map_->buckets_at());
  return {table + map_->first_bucket(shard), static_cast<size_t>(map_->index(shard).buckets())};
}

void AdamW::forget_gradients() {
  for (size_t shard = 0; shard < shards(); ++shard) {
    arriving_[shard] = GradientArrival{};
    const ShardIndex& index = map_->index(shard);
    const std::span<Bucket> of_shard = buckets(shard);
    for (int64_t bucket = 0; bucket < index.buckets(); ++bucket) {
      const int64_t n = index.bucket_begin(bucket + 1) - index.bucket_begin(bucket);
      of_shard[static_cast<size_t>(bucket)] = Bucket{.left = n};
    }
  }
}

void AdamW::claim(size_t shard, int64_t at, int64_t n) {
  checked_shard(shard);
  const int64_t numel = map_->index(shard).numel();
  if (at < 0 || n < 0 || at > numel - n) {
    fail_about(shard,
               fmt::format("expected gradient elements within [0, {}), got {} elements from {}",
                           numel, n, at));
  }
  if (n == 0) return;
  const std::lock_guard lock(mutex_);
  GradientArrival& arriving = arriving_[shard];
  if (arriving.left_out) fail_about(shard, "its gradient was left out of this step");
  if (!arriving.arrived.add(at, at + n)) {
    fail_about(shard, fmt::format("expected elements that have not arrived in this step, got local "
                                  "elements {} to {}",
                                  at, at + n));
  }
}

void AdamW::arrive(const Piece& piece) {
  claim(piece.shard, piece.at, piece.n);
  const ShardIndex& index = map_->index(piece.shard);
  const int64_t from_bytes = bytes_per_element(piece.dtype);
  index.for_each_stretch(piece.at, piece.at + piece.n, [&](const Stretch& stretch) {
    const std::byte* const from = piece.elements + (stretch.at - piece.at) * from_bytes;
    std::byte* const to = element(piece.shard, Plane::grad, stretch.at);
    cast(from, piece.dtype, to, row_.grad, stretch.n);
    settle(piece.shard, index.bucket_of(stretch.first), stretch.n);
  });
}

void AdamW::arrived_in_place(size_t shard, int64_t at, int64_t n) {
  claim(shard, at, n);
  const ShardIndex& index = map_->index(shard);
  index.for_each_stretch(at, at + n, [&](const Stretch& stretch) {
    settle(shard, index.bucket_of(stretch.first), stretch.n);
  });
}

void AdamW::leave_out(size_t shard) {
  const std::lock_guard lock(mutex_);
  GradientArrival& arriving = arriving_[checked_shard(shard)];
  if (arriving.arrived.count() > 0) {
    fail_about(shard, fmt::format("its gradient can't be left out: {} elements have arrived",
                                  arriving.arrived.count()));
  }
  arriving.left_out = true;
}

// acq_rel: the thread that delivers a bucket's last element must see the gradients that other
// threads have written.
void AdamW::settle(size_t shard, int64_t bucket, int64_t n) {
  Bucket& entry = buckets(shard)[static_cast<size_t>(bucket)];
  const std::atomic_ref<int64_t> left(entry.left);
  if (left.fetch_sub(n, std::memory_order_acq_rel) == n) take_norm(shard, bucket);
}

void AdamW::take_norm(size_t shard, int64_t bucket) {
  const ShardIndex& index = map_->index(shard);
  GradNorm norm;
  index.for_each_stretch(
      index.bucket_begin(bucket), index.bucket_begin(bucket + 1), [&](const Stretch& stretch) {
        norm += squares(element(shard, Plane::grad, stretch.at), row_.grad, stretch.n);
      });
  buckets(shard)[static_cast<size_t>(bucket)].norm = norm;
}

void AdamW::require_complete() const {
  for (size_t shard = 0; shard < shards(); ++shard) {
    const GradientArrival& arriving = arriving_[shard];
    const int64_t numel = map_->index(shard).numel();
    if (arriving.left_out || arriving.arrived.count() == numel) continue;
    fail_about(shard, fmt::format("its gradient has not arrived: {} of {} elements",
                                  arriving.arrived.count(), numel));
  }
}

template <typename Fn>
void AdamW::for_each_norm(const Fn& fn) const {
  require_complete();
  for (size_t shard = 0; shard < shards(); ++shard) {
    if (arriving_[shard].left_out) continue;
    for (const Bucket& bucket : buckets(shard)) fn(shard, bucket.norm);
  }
}

std::vector<GradNorm> AdamW::norms() const {
  std::vector<GradNorm> norms(shards());
  for_each_norm([&](size_t shard, const GradNorm& norm) { norms[shard] += norm; });
  return norms;
}

GradNorm AdamW::norm() const {
  GradNorm sum;
  for_each_norm([&](size_t shard, const GradNorm& norm) {
    sum += {spec_.shards[shard].counts ? norm.sum_of_squares : 0, norm.finite};
  });
  return sum;
}

void AdamW::require_finite_gradients() const {
  for_each_norm([&](size_t shard, const GradNorm& norm) {
    if (norm.finite) return;
    const std::string& fqn = spec_.shards[shard].fqn;
    fail(Category::usage,
         fmt::format("parameter '{}': its gradient is not finite; skip this step", printable(fqn)),
         {.tensor = fqn});
  });
}

}  // namespace modicum
