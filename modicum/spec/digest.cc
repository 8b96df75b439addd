#include "modicum/spec/digest.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

namespace modicum {

struct Hasher::State {
  XXH3_state_t xxh;
};

Hasher::Hasher() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh); }
Hasher::~Hasher() = default;

Hasher& Hasher::bytes(const void* data, size_t size) {
  XXH3_128bits_update(&state_->xxh, data, size);
  return *this;
}

Hasher& Hasher::add(std::string_view text) {
  add(text.size());
  return bytes(text.data(), text.size());
}

Hasher& Hasher::add(const std::vector<int64_t>& numbers) {
  add(numbers.size());
  return bytes(numbers.data(), numbers.size() * sizeof(int64_t));
}

Digest Hasher::digest() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh);
  return {hash.high64, hash.low64};
}

std::string Digest::hex() const { return fmt::format("{:016x}{:016x}", high, low); }

}  // namespace modicum
