#include "modicum/synth/mark.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "modicum/base/base.h"
#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

constexpr const char* kMarkKey = "modicum.synth";
constexpr const char* kEdgesKey = "modicum.synth.edges";
constexpr const char* kDense = "1";
constexpr const char* kSparse = "sparse";
constexpr int64_t kFirstBytes = 4096;
constexpr int64_t kBytesPerSide = 2048;

// Parses positive numbers separated by commas, such as "2,4". nullopt for any other text.
std::optional<std::vector<int64_t>> parse_edges(std::string_view text) {
  std::vector<int64_t> edges;
  const char* const end = text.data() + text.size();
  for (const char* at = text.data();; ++at) {
    int64_t world = 0;
    const auto [next, error] = std::from_chars(at, end, world);
    if (error != std::errc() || world < 1) return std::nullopt;
    edges.push_back(world);
    if (next == end) return edges;
    if (*next != ',') return std::nullopt;
    at = next;
  }
}

int64_t round_down(int64_t value, int64_t step) { return value / step * step; }

// The number of elements in `bytes`, rounded down to whole granules.
int64_t elements_in(int64_t bytes, DType dtype) {
  return round_down(bytes * 8 / bits_per_element(dtype), synth_granule(dtype));
}

// Collects the written ranges, clipped to [first, first + n).
class WrittenRanges {
 public:
  WrittenRanges(const TensorSpec& stored, int64_t first, int64_t n)
      : dtype_(stored.dtype), numel_(numel_of(stored.shape)), begin_(first), end_(first + n) {
    add({0, elements_in(kFirstBytes, dtype_)});
  }

  // Adds the ranges around the boundaries between the shards of `world` ranks. Visits only those
  // boundaries near [begin_, end_): callers divide a tensor into many small ranges.
  void add_cuts(int64_t rows, int64_t world) {
    if (numel_ == 0) return;
    const int64_t per_shard = ceil_div(rows, world) * (numel_ / rows);
    const int64_t side = elements_in(kBytesPerSide, dtype_);
    int64_t cut = std::max<int64_t>(1, (begin_ - side) / per_shard) * per_shard;
    for (; cut < numel_ && cut - side < end_; cut += per_shard) add({cut - side, cut + side});
  }

  std::vector<ElementRange> merged() {
    std::sort(ranges_.begin(), ranges_.end(),
              [](const ElementRange& a, const ElementRange& b) { return a.begin < b.begin; });
    std::vector<ElementRange> merged;
    for (const ElementRange& range : ranges_) {
      if (!merged.empty() && range.begin <= merged.back().end) {
        merged.back().end = std::max(merged.back().end, range.end);
      } else {
        merged.push_back(range);
      }
    }
    return merged;
  }

 private:
  void add(ElementRange range) {
    const int64_t granule = synth_granule(dtype_);
    range.begin = std::max(round_down(std::max<int64_t>(range.begin, 0), granule), begin_);
    range.end = std::min(ceil_div(range.end, granule) * granule, std::min(numel_, end_));
    if (range.begin < range.end) ranges_.push_back(range);
  }

  DType dtype_;
  int64_t numel_;
  int64_t begin_;
  int64_t end_;
  std::vector<ElementRange> ranges_;
};

}  // namespace

std::map<std::string, std::string> synth_metadata(const SynthMark& mark) {
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  metadata[kMarkKey] = mark.is_sparse ? kSparse : kDense;
  if (!mark.edges.empty()) metadata[kEdgesKey] = fmt::format("{}", fmt::join(mark.edges, ","));
  return metadata;
}

std::optional<SynthMark> synth_mark(const std::map<std::string, std::string>& metadata) {
  const auto kind = metadata.find(kMarkKey);
  if (kind == metadata.end()) return std::nullopt;
  const auto edges = metadata.find(kEdgesKey);
  if (kind->second == kDense && edges == metadata.end()) return SynthMark{};
  if (kind->second != kSparse) return std::nullopt;
  SynthMark mark;
  mark.is_sparse = true;
  if (edges == metadata.end()) return mark;
  const auto worlds = parse_edges(edges->second);
  if (!worlds) return std::nullopt;
  mark.edges = *worlds;
  return mark;
}

int64_t synth_granule(DType dtype) noexcept {
  switch (bits_per_element(dtype)) {
    case 4: return 2;
    case 6: return 4;
    default: return 1;
  }
}

std::vector<ElementRange> synth_written(const SynthMark& mark, const TensorSpec& stored,
                                        int64_t first, int64_t n) {
  MODICUM_ASSERT(first >= 0);
  MODICUM_ASSERT(n >= 0);
  MODICUM_ASSERT(n <= numel_of(stored.shape) - first);
  if (n == 0) return {};
  if (!mark.is_sparse) return {{first, first + n}};
  WrittenRanges written(stored, first, n);
  if (!stored.shape.empty()) {
    for (const int64_t world : mark.edges) written.add_cuts(stored.shape[0], world);
  }
  return written.merged();
}

void synth_expected(const SynthMark& mark, const TensorSpec& stored, int64_t first, int64_t n,
                    std::byte* out) {
  MODICUM_ASSERT(first % synth_granule(stored.dtype) == 0);
  MODICUM_ASSERT(n % synth_granule(stored.dtype) == 0);
  if (n == 0) return;
  const uint64_t hash = name_hash(stored.fqn);
  if (mark.is_sparse) std::memset(out, 0, bytes_of(stored.dtype, n));
  for (const ElementRange& range : synth_written(mark, stored, first, n)) {
    synth_fill(hash, stored.dtype, range.begin, range.end - range.begin,
               out + bytes_of(stored.dtype, range.begin - first));
  }
}

}  // namespace modicum
