#include "modicum/stream/diff.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>

#include "modicum/stream/reader.h"

namespace modicum {
namespace {

// Compares the bytes of two tensors of one dtype and shape.
class Comparison {
 public:
  Comparison(const Checkpoint& a, const Checkpoint& b, FunctionRef<void(uint64_t)> poll)
      : a_(a), b_(b), poll_(poll), buffer_(kDiffBytes) {}

  // The difference of two tensors' values, if any.
  std::optional<Difference> values(const Stored& of_a, const Stored& of_b) {
    Difference found{.tensor = of_a.spec.fqn, .count = 0};
    const auto half = std::span(buffer_).first(buffer_.size() / 2);
    const auto other = std::span(buffer_).subspan(half.size());
    for (uint64_t done = 0; done < of_a.at.bytes(); done += half.size()) {
      const uint64_t n = std::min<uint64_t>(half.size(), of_a.at.bytes() - done);
      a_.read(of_a.at.file, of_a.at.begin + done, half.first(n));
      b_.read(of_b.at.file, of_b.at.begin + done, other.first(n));
      poll_(n);
      if (std::memcmp(half.data(), other.data(), n) == 0) continue;
      count(half.first(n), other.first(n), {of_a.spec.dtype, done}, found);
    }
    return found.count == 0 ? std::nullopt : std::optional(std::move(found));
  }

  void finish() {
    a_.finish();
    b_.finish();
  }

 private:
  struct Place {
    DType dtype;
    uint64_t begin;  // byte of the tensor
  };
  // If one 4-bit element of a byte differs, both count.
  static void count(std::span<const std::byte> a, std::span<const std::byte> b, const Place& at,
                    Difference& found) {
    const auto bits = static_cast<uint64_t>(bits_per_element(at.dtype));
    const uint64_t unit = std::max<uint64_t>(8, bits) / 8;
    for (uint64_t i = 0; i < a.size(); i += unit) {
      if (std::memcmp(a.data() + i, b.data() + i, unit) == 0) continue;
      const auto index = static_cast<int64_t>((at.begin + i) * 8 / bits);
      if (found.count == 0) found.first_index = index;
      found.count += static_cast<int64_t>(unit * 8 / bits);
    }
  }

  DataReader a_, b_;
  const FunctionRef<void(uint64_t)> poll_;
  std::vector<std::byte> buffer_;
};

Difference whole(const TensorSpec& spec, Difference::Kind kind) {
  return {.tensor = spec.fqn, .kind = kind, .count = numel_of(spec.shape)};
}

}  // namespace

std::string_view kind_name(Difference::Kind kind) noexcept {
  constexpr std::array<std::string_view, 5> kNames = {"only_in_a", "only_in_b", "dtype", "shape",
                                                      "values"};
  return kNames[static_cast<size_t>(kind)];
}

Differences diff(const Checkpoint& a, const Checkpoint& b, int threads,
                 FunctionRef<void(uint64_t)> poll) {
  std::map<std::string_view, const Stored*> left;  // tensors of B not yet found in A
  for (const Stored& stored : b.manifest.tensors) left[stored.spec.fqn] = &stored;
  const auto& tensors = a.manifest.tensors;
  std::vector<std::optional<Difference>> of(tensors.size());
  std::vector<const Stored*> same(tensors.size());  // by tensor of A: B's, if values are compared
  Differences all;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const TensorSpec& spec = tensors[t].spec;
    const auto found = left.find(spec.fqn);
    if (found == left.end()) {
      of[t] = whole(spec, Difference::Kind::only_in_a);
      continue;
    }
    const Stored& other = *found->second;
    left.erase(found);
    ++all.tensors;
    if (other.spec.dtype != spec.dtype) {
      of[t] = whole(spec, Difference::Kind::dtype);
    } else if (other.spec.shape != spec.shape) {
      of[t] = whole(spec, Difference::Kind::shape);
    } else {
      same[t] = &other;
      all.bytes += other.at.bytes();
    }
  }
  run_workers(threads, [&](int worker) {
    Comparison comparison(a, b, poll);
    for (size_t t = static_cast<size_t>(worker); t < tensors.size();
         t += static_cast<size_t>(threads)) {
      if (same[t] != nullptr) of[t] = comparison.values(tensors[t], *same[t]);
    }
    comparison.finish();
  });
  for (std::optional<Difference>& difference : of) {
    if (difference) all.found.push_back(std::move(*difference));
  }
  for (const Stored& stored : b.manifest.tensors) {
    if (left.contains(stored.spec.fqn)) {
      all.found.push_back(whole(stored.spec, Difference::Kind::only_in_b));
    }
  }
  return all;
}

}  // namespace modicum
