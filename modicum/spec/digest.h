// 128-bit digests: equal values have equal digests, and different values practically always have
// different digests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace modicum {

struct Digest {
  uint64_t high = 0;
  uint64_t low = 0;

  bool operator==(const Digest&) const = default;
  std::string hex() const;  // 32 lower-case digits
};

// Digests a sequence of values (XXH3, 128 bits). Texts and lists are prefixed with their length, so
// that {"ab", "c"} and {"a", "bc"} differ. Not thread-safe.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  Hasher& add(std::string_view text);
  // As add(text), for a text in parts: first its size, add(size_t), then add_part for each part.
  Hasher& add_part(std::span<const std::byte> part) { return bytes(part.data(), part.size()); }
  Hasher& add(const std::vector<int64_t>& numbers);
  template <typename T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) Hasher& add(T value) {
    return bytes(&value, sizeof value);
  }
  Digest digest() const;

 private:
  Hasher& bytes(const void* data, size_t size);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace modicum
