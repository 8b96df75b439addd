#include "modicum/stream/diff.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <string_view>

#include "modicum/kernels/kernels.h"
#include "modicum/stream/compared.h"
#include "modicum/stream/reader.h"

namespace modicum {
namespace {

// The absolute difference of two numbers; infinite if only one is finite, or one is NaN.
double distance(double a, double b) noexcept {
  if (a == b) return 0;
  const double difference = std::abs(a - b);
  return std::isfinite(difference) ? difference : std::numeric_limits<double>::infinity();
}

// One of the two checkpoints.
struct DiffSource {
  explicit DiffSource(const Checkpoint& source) : checkpoint(source), compared(source.manifest) {}

  const Checkpoint& checkpoint;
  ComparedChunks compared;
};

// Reads a source, and compares what it reads with the source's record.
class DiffReader {
 public:
  explicit DiffReader(DiffSource& source) : source_(source), reader_(source.checkpoint) {}
  void read(const StoredTensor& stored, uint64_t at, std::span<std::byte> out) {
    reader_.read(stored.at.file, stored.at.begin + at, out);
    const auto index = &stored - source_.checkpoint.manifest.tensors.data();
    source_.compared.add(static_cast<uint32_t>(index), at, out);
  }
  void finish() { reader_.finish(); }

 private:
  DiffSource& source_;
  DataReader reader_;
};

// Compares the values of two tensors of equal shape.
class Comparison {
 public:
  Comparison(DiffSource& a, DiffSource& b, FunctionRef<void(uint64_t)> poll)
      : a_(a), b_(b), poll_(poll), buffer_(kDiffBytes) {}

  // The difference of the values of two tensors of equal dtype, if any.
  std::optional<Difference> values(const StoredTensor& of_a, const StoredTensor& of_b) {
    Difference found{.tensor = of_a.spec.fqn, .shape = of_a.spec.shape};
    const auto from_a = std::span(buffer_).first(buffer_.size() / 2);
    const auto from_b = std::span(buffer_).subspan(from_a.size());
    for (uint64_t done = 0; done < of_a.at.bytes(); done += from_a.size()) {
      const uint64_t n = std::min<uint64_t>(from_a.size(), of_a.at.bytes() - done);
      a_.read(of_a, done, from_a.first(n));
      b_.read(of_b, done, from_b.first(n));
      poll_(n);
      if (std::memcmp(from_a.data(), from_b.data(), n) == 0) continue;
      const Side a{from_a.data(), of_a.spec.dtype}, b{from_b.data(), of_b.spec.dtype};
      count({a, b, a, b, n, done}, found);
    }
    return found.count == 0 ? std::nullopt : std::optional(std::move(found));
  }

  // The difference of two tensors whose dtypes differ and are castable.
  Difference rounded(const StoredTensor& of_a, const StoredTensor& of_b) {
    const DType dtype_a = of_a.spec.dtype, dtype_b = of_b.spec.dtype;
    Difference to_a = of_dtypes(of_a.spec, of_b.spec), to_b = to_a;
    to_a.rounded_to = dtype_a;
    to_b.rounded_to = dtype_b;
    const size_t room = buffer_.size() / 3 / sizeof(float) * sizeof(float);
    const auto from_a = std::span(buffer_).first(room);
    const auto from_b = std::span(buffer_).subspan(room, room);
    std::byte* const narrow = buffer_.data() + 2 * room;
    const auto most = static_cast<int64_t>(room / sizeof(float));
    const int64_t numel = numel_of(of_a.spec.shape);
    for (int64_t done = 0; done < numel; done += most) {
      const int64_t n = std::min(most, numel - done);
      const auto read = [&](DiffReader& reader, const StoredTensor& tensor,
                            std::span<std::byte> out) {
        reader.read(tensor, bytes_of(tensor.spec.dtype, done),
                    out.first(bytes_of(tensor.spec.dtype, n)));
        return Side{out.data(), tensor.spec.dtype};
      };
      const Side a = read(a_, of_a, from_a), b = read(b_, of_b, from_b);
      poll_(bytes_of(dtype_a, n));
      const auto compare = [&](const Side& wide, const Side& other, Difference& found) {
        cast(wide.bytes, wide.dtype, narrow, other.dtype, n);
        found.overflowed += count_specials(narrow, other.dtype, n).infinities -
                            count_specials(wide.bytes, wide.dtype, n).infinities;
        count({{narrow, other.dtype},
               other,
               a,
               b,
               bytes_of(other.dtype, n),
               bytes_of(other.dtype, done)},
              found);
      };
      if (dtype_b != DType::f32) compare(a, b, to_b);
      if (dtype_a != DType::f32) compare(b, a, to_a);
    }
    if (dtype_b == DType::f32) return to_a;
    return dtype_a == DType::f32 || to_b.count <= to_a.count ? to_b : to_a;
  }

  // The difference of two tensors whose dtypes differ, without their values.
  static Difference of_dtypes(const TensorSpec& a, const TensorSpec& b) {
    return {.tensor = a.fqn,
            .kind = Difference::Kind::dtype,
            .dtype_a = a.dtype,
            .dtype_b = b.dtype,
            .shape = a.shape};
  }

  void finish() {
    a_.finish();
    b_.finish();
  }

 private:
  struct Side {
    const std::byte* bytes;
    DType dtype;
  };
  struct Elements {
    Side compared_a, compared_b;  // of one dtype
    Side a, b;                    // as stored
    uint64_t bytes, begin;        // size of the compared elements, and their place in the tensor
  };
  // Elements of less than 8 bits are compared by bytes: of two 4-bit elements in a byte both are
  // counted, and of 6-bit elements one for each byte that differs.
  static void count(const Elements& elements, Difference& found) {
    const DType dtype = elements.compared_a.dtype;
    const auto bits = static_cast<uint64_t>(bits_per_element(dtype));
    const uint64_t unit = std::max<uint64_t>(8, bits) / 8;
    const bool are_numbers = is_castable(dtype);
    for (uint64_t i = 0; i < elements.bytes; i += unit) {
      if (std::memcmp(elements.compared_a.bytes + i, elements.compared_b.bytes + i, unit) == 0)
        continue;
      const auto index = static_cast<int64_t>((elements.begin + i) * 8 / bits);
      if (are_numbers) {
        const auto element = static_cast<int64_t>(i / unit);
        const double a = value_at(elements.a.bytes, elements.a.dtype, element);
        const double b = value_at(elements.b.bytes, elements.b.dtype, element);
        if (elements.a.dtype != elements.b.dtype && std::isnan(a) && std::isnan(b)) continue;
        if (const double by = distance(a, b); !found.largest || by > *found.largest) {
          found.largest = by;
          found.largest_index = index;
        }
      }
      if (found.count == 0) found.first_index = index;
      found.count += static_cast<int64_t>(unit * 8 / bits);
    }
  }

  DiffReader a_, b_;
  const FunctionRef<void(uint64_t)> poll_;
  std::vector<std::byte> buffer_;
};

// A difference that counts all elements of the tensor.
Difference whole(const TensorSpec& spec, Difference::Kind kind) {
  return {.tensor = spec.fqn, .kind = kind, .count = numel_of(spec.shape), .shape = spec.shape};
}

}  // namespace

std::string_view kind_name(Difference::Kind kind) noexcept {
  constexpr std::array<std::string_view, 5> kNames = {"only_in_a", "only_in_b", "dtype", "shape",
                                                      "values"};
  return kNames[static_cast<size_t>(kind)];
}

Differences diff(const Checkpoint& a, const Checkpoint& b, int threads,
                 FunctionRef<void(uint64_t)> poll) {
  std::map<std::string_view, const StoredTensor*> unmatched;  // tensors of B not found in A yet
  for (const StoredTensor& stored : b.manifest.tensors) unmatched[stored.spec.fqn] = &stored;
  const auto& tensors = a.manifest.tensors;
  std::vector<std::optional<Difference>> difference_of(tensors.size());  // by tensor of A
  // By tensor of A: the tensor of B with which its values are compared, or null.
  std::vector<const StoredTensor*> to_compare(tensors.size());
  Differences all;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const TensorSpec& spec = tensors[t].spec;
    const auto found = unmatched.find(spec.fqn);
    if (found == unmatched.end()) {
      difference_of[t] = whole(spec, Difference::Kind::only_in_a);
      continue;
    }
    const StoredTensor& other = *found->second;
    unmatched.erase(found);
    ++all.tensors;
    const bool is_same_dtype = other.spec.dtype == spec.dtype;
    const bool is_comparable =
        is_same_dtype || (is_castable(spec.dtype) && is_castable(other.spec.dtype));
    if (is_comparable && other.spec.shape == spec.shape) {
      to_compare[t] = &other;
      all.bytes += tensors[t].at.bytes();
    } else if (is_same_dtype) {
      difference_of[t] = whole(spec, Difference::Kind::shape);
    } else {
      difference_of[t] = Comparison::of_dtypes(spec, other.spec);
      difference_of[t]->count = numel_of(spec.shape);
    }
  }
  DiffSource from_a(a), from_b(b);
  run_workers(threads, [&](int worker) {
    Comparison comparison(from_a, from_b, poll);
    for (size_t t = static_cast<size_t>(worker); t < tensors.size();
         t += static_cast<size_t>(threads)) {
      const StoredTensor* const other = to_compare[t];
      if (other == nullptr) continue;
      difference_of[t] = other->spec.dtype == tensors[t].spec.dtype
                             ? comparison.values(tensors[t], *other)
                             : comparison.rounded(tensors[t], *other);
    }
    comparison.finish();
  });
  all.with_record = from_a.compared.finish();
  const ComparedValues of_b = from_b.compared.finish();
  all.with_record.bytes += of_b.bytes;
  std::vector<std::string>& names = all.with_record.not_compared;
  names.insert(names.end(), of_b.not_compared.begin(), of_b.not_compared.end());
  for (std::optional<Difference>& difference : difference_of) {
    if (difference) all.found.push_back(std::move(*difference));
  }
  for (const StoredTensor& stored : b.manifest.tensors) {
    if (unmatched.contains(stored.spec.fqn)) {
      all.found.push_back(whole(stored.spec, Difference::Kind::only_in_b));
    }
  }
  return all;
}

}  // namespace modicum
