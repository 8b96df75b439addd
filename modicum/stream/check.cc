// What can be done with a rank's loaded values: check them, digest them, dump them to a file.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "modicum/kernels/kernels.h"
#include "modicum/stream/expected_fp8.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

constexpr int64_t kCheckElements = 8 * 1024;  // the most that are compared at a time

// A little-endian number, its most significant byte first.
std::string hex(std::span<const std::byte> bytes) {
  std::string text = "0x";
  for (size_t i = bytes.size(); i-- > 0;) text += fmt::format("{:02x}", static_cast<int>(bytes[i]));
  return text;
}

// Compares loaded elements with elements that it makes itself from `expected`.
class ValueCheck {
 public:
  ValueCheck(const Plan& plan, int rank, ExpectedElements expected, const LoadOptions& options)
      : plan_(plan), rank_(rank), expected_(expected), options_(options), fp8_(plan, expected) {}

  // Checks `elements`, the elements of a local buffer from element `at` on.
  void local(uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
    const LocalBuffer local = buffer_of(plan_, buffer, rank_);
    const auto n = static_cast<int64_t>(elements.size()) * 8 / bits_per_element(local.dtype);
    const auto bytes_from = [&](int64_t element) {
      return elements.subspan(bytes_of(local.dtype, element - at));
    };
    for_each_held_run(plan_, buffer, rank_, {at, at + n},
                      [&](uint32_t target, int64_t global, int64_t place, int64_t count) {
                        run(target, global, count, bytes_from(place));
                      });
    if (at + n <= local.numel) return;
    const auto padding = bytes_from(std::max(at, local.numel));
    if (std::any_of(padding.begin(), padding.end(), [](std::byte b) { return b != std::byte{}; })) {
      fail(Category::integrity, "the padding of a local buffer is not zero",
           {.tensor = buffer_name(plan_, buffer), .rank = rank_});
    }
  }

 private:
  // Checks `n` contiguous elements of target `t` from element `global` on.
  void run(uint32_t t, int64_t global, int64_t n, std::span<const std::byte> elements) {
    const Target& target = plan_.recipe->targets[t];
    const DType dtype = target.spec.dtype;
    const bool whole_bytes = bits_per_element(dtype) % 8 == 0;
    for (int64_t i = 0; i < n;) {
      const ElementSource source = element_source(*plan_.recipe, target.root, global + i);
      const int64_t count = std::min({source.count, n - i, kCheckElements});
      MODICUM_ASSERT(whole_bytes || count % 2 == 0);  // two 4-bit elements share a byte
      source_bytes_.resize(bytes_of(source.leaf->dtype, count));
      expected_bytes_.resize(bytes_of(dtype, count));
      make(t, source, count);
      if (is_dequantised(*plan_.recipe, target)) {
        const auto numbers = fp8_.numbers(source.leaf->from, source.first, source_bytes_);
        cast(numbers.data(), DType::f32, expected_bytes_.data(), dtype, count);
      } else {
        cast(source_bytes_.data(), source.leaf->dtype, expected_bytes_.data(), dtype, count);
      }
      const auto got = elements.subspan(bytes_of(dtype, i), expected_bytes_.size());
      if (std::memcmp(got.data(), expected_bytes_.data(), expected_bytes_.size()) != 0)
        differ(target, global + i, got);
      i += count;
    }
  }

  // Puts `count` elements of the source into source_bytes_, in the source's dtype.
  void make(uint32_t t, const ElementSource& source, int64_t count) {
    const Node& leaf = *source.leaf;
    switch (leaf.op) {
      case Op::stored: return expected_(leaf.from, source.first, count, source_bytes_);
      case Op::caller: {
        const auto whole = options_.caller(leaf.from);
        std::memcpy(source_bytes_.data(), whole.data() + bytes_of(leaf.dtype, source.first),
                    source_bytes_.size());
        return;
      }
      default: {
        const std::string& fqn = plan_.recipe->targets[t].spec.fqn;
        init_fill({static_cast<InitKind>(leaf.arg[0]), std::bit_cast<double>(leaf.arg[1]),
                   options_.init_seed ^ name_hash(fqn), leaf.dtype},
                  source.first, count, source_bytes_.data());
      }
    }
  }

  // `got` are the held bytes from element `first` on.
  [[noreturn]] void differ(const Target& target, int64_t first, std::span<const std::byte> got) {
    const int bits = bits_per_element(target.spec.dtype);
    const auto size = static_cast<size_t>(std::max(1, bits / 8));
    size_t at = 0;
    while (got[at] == expected_bytes_[at]) ++at;
    at = at / size * size;  // the first byte of the element that differs
    fail(Category::integrity,
         fmt::format("the loaded value of element {} differs from the expected one",
                     first + static_cast<int64_t>(at) * 8 / bits),
         {.tensor = target.spec.fqn,
          .rank = rank_,
          .expected = hex(std::span(expected_bytes_).subspan(at, size)),
          .got = hex(got.subspan(at, size))});
  }

  const Plan& plan_;
  const int rank_;
  const ExpectedElements expected_;
  const LoadOptions& options_;
  ExpectedFp8 fp8_;
  std::vector<std::byte> source_bytes_, expected_bytes_;
};

// Calls `fn` for the local buffers of the targets, in file order, then for those of flat groups.
// Aliases have no buffer.
void for_each_own_buffer(const Plan& plan, FunctionRef<void(uint32_t buffer)> fn) {
  for (const uint32_t t : plan.order) {
    if (!plan.recipe->is_alias(t) && !plan.layout.is_flat(t)) fn(t);
  }
  for (auto b = static_cast<uint32_t>(plan.recipe->targets.size()); b < buffer_count(plan); ++b)
    fn(b);
}

}  // namespace

void check_elements(const Plan& plan, const HeldElements& elements, ExpectedElements expected,
                    const LoadOptions& options) {
  ValueCheck(plan, elements.rank, expected, options)
      .local(elements.buffer, elements.at, elements.bytes);
}

void check_values(const Plan& plan, int rank, Sink& sink, ExpectedElements expected,
                  const LoadOptions& options) {
  checked_rank(rank, plan, sink);
  ValueCheck check(plan, rank, expected, options);
  for_each_own_buffer(plan, [&](uint32_t b) { check.local(b, 0, sink.host(b)); });
}

uint64_t digest_of_rank(const Plan& plan, int rank, Sink& sink, Poll poll) {
  checked_rank(rank, plan, sink);
  DigestSum sum(plan, rank);
  for_each_own_buffer(plan, [&](uint32_t b) {
    poll();
    const LocalBuffer local = buffer_of(plan, b, rank);
    sum.add(b, 0, sink.host(b).first(bytes_of(local.dtype, local.numel)));
  });
  return sum.value();
}

void dump_rank(const Plan& plan, int rank, Sink& sink, const DumpFile& to, Poll poll) {
  constexpr uint64_t kPartBytes = 8 * kMiB;  // between two heartbeats
  constexpr uint64_t kMaxDirtyBytes = 256 * kMiB;
  checked_rank(rank, plan, sink);
  std::vector<TensorSpec> specs;
  std::vector<uint32_t> buffers;
  for (uint32_t b = 0; b < buffer_count(plan); ++b) {
    const bool is_target = b < plan.recipe->targets.size();
    const uint32_t holder = holder_of(plan, b);
    if (is_target && plan.layout.is_flat(holder)) continue;
    const LocalBuffer local = buffer_of(plan, holder, rank);
    TensorSpec spec{buffer_name(plan, b), Role::param, local.dtype, {local.numel}};
    if (is_target) {
      spec.shape =
          local_shape(plan.layout.sharding_of(holder), plan.recipe->targets[holder].spec, rank);
    }
    specs.push_back(std::move(spec));
    buffers.push_back(holder);
  }
  SafetensorsWriter out(to.files, to.path, specs);
  uint64_t dirty = 0;
  for (size_t i = 0; i < specs.size(); ++i) {
    const uint64_t bytes = bytes_of(specs[i].dtype, numel_of(specs[i].shape));
    const std::span<const std::byte> values = sink.host(buffers[i]).first(bytes);
    for (uint64_t at = 0; at < bytes; at += kPartBytes) {
      poll();
      const std::span<const std::byte> part = values.subspan(at, std::min(kPartBytes, bytes - at));
      out.write(i, at, part);
      dirty += part.size();
      if (dirty < kMaxDirtyBytes) continue;
      out.sync();  // one sync of a large file would last longer than a silence may
      dirty = 0;
    }
  }
  out.finish();
}

}  // namespace modicum
