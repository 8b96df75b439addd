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

// Compares the bytes of two tensors of equal dtype and shape.
class Comparison {
 public:
  Comparison(const Checkpoint& a, const Checkpoint& b, FunctionRef<void(uint64_t)> poll)
      : a_(a), b_(b), poll_(poll), buffer_(kDiffBytes) {}

  // The difference of two tensors' values, if any.
  std::optional<Difference> values(const Stored& of_a, const Stored& of_b) {
    Difference found{.tensor = of_a.spec.fqn, .count = 0};
    const auto from_a = std::span(buffer_).first(buffer_.size() / 2);
    const auto from_b = std::span(buffer_).subspan(from_a.size());
    for (uint64_t done = 0; done < of_a.at.bytes(); done += from_a.size()) {
      const uint64_t n = std::min<uint64_t>(from_a.size(), of_a.at.bytes() - done);
      a_.read(of_a.at.file, of_a.at.begin + done, from_a.first(n));
      b_.read(of_b.at.file, of_b.at.begin + done, from_b.first(n));
      poll_(n);
      if (std::memcmp(from_a.data(), from_b.data(), n) == 0) continue;
      count(from_a.first(n), from_b.first(n), {of_a.spec.dtype, done}, found);
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
    uint64_t begin;  // of the compared bytes within the tensor
  };
  // Elements of less than 8 bits are compared by bytes: of two 4-bit elements in a byte both are
  // counted, and of 6-bit elements one for each byte that differs.
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

// A difference that counts all elements of the tensor.
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
  std::map<std::string_view, const Stored*> unmatched;  // tensors of B not found in A yet
  for (const Stored& stored : b.manifest.tensors) unmatched[stored.spec.fqn] = &stored;
  const auto& tensors = a.manifest.tensors;
  std::vector<std::optional<Difference>> difference_of(tensors.size());  // by tensor of A
  // By tensor of A: the tensor of B with which its values are compared, or null.
  std::vector<const Stored*> to_compare(tensors.size());
  Differences all;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const TensorSpec& spec = tensors[t].spec;
    const auto found = unmatched.find(spec.fqn);
    if (found == unmatched.end()) {
      difference_of[t] = whole(spec, Difference::Kind::only_in_a);
      continue;
    }
    const Stored& other = *found->second;
    unmatched.erase(found);
    ++all.tensors;
    if (other.spec.dtype != spec.dtype) {
      difference_of[t] = whole(spec, Difference::Kind::dtype);
    } else if (other.spec.shape != spec.shape) {
      difference_of[t] = whole(spec, Difference::Kind::shape);
    } else {
      to_compare[t] = &other;
      all.bytes += other.at.bytes();
    }
  }
  run_workers(threads, [&](int worker) {
    Comparison comparison(a, b, poll);
    for (size_t t = static_cast<size_t>(worker); t < tensors.size();
         t += static_cast<size_t>(threads)) {
      if (to_compare[t] != nullptr) {
        difference_of[t] = comparison.values(tensors[t], *to_compare[t]);
      }
    }
    comparison.finish();
  });
  for (std::optional<Difference>& difference : difference_of) {
    if (difference) all.found.push_back(std::move(*difference));
  }
  for (const Stored& stored : b.manifest.tensors) {
    if (unmatched.contains(stored.spec.fqn)) {
      all.found.push_back(whole(stored.spec, Difference::Kind::only_in_b));
    }
  }
  return all;
}

}  // namespace modicum
